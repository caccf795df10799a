"""A schedule from outside the package, registered by name: in `schedule`, `simulate`, `plan` and a Pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock import InputError
from penstock.planners.search import space
from penstock.schedules.registry import METHODS

torch.set_num_threads(1)


def waves(request: penstock.ScheduleRequest) -> penstock.Schedule:
    """With size 2, rank 0 of 2: F0 F1 B0 B1 F2 F3 B2 B3."""
    size, ranks = request.options.get("size", request.stages), []
    for stage in range(request.stages):
        words = []
        for first in range(0, request.microbatches, size):
            wave = range(first, min(first + size, request.microbatches))
            words += [f"{stage}F{k}" for k in wave] + [f"{stage}B{k}" for k in wave]
        ranks.append(words)
    return request.schedule(ranks)


@pytest.fixture(autouse=True)
def _registered():
    before = dict(METHODS)
    penstock.register_schedule("waves", summary="waves", options={"size": "micro-batches of a wave"})(waves)
    yield
    METHODS.clear()
    METHODS.update(before)
    space._registered.clear()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())


def trained(schedule: str, **options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipe = penstock.Pipeline(
        net(),
        example=torch.ones(1, 3),
        stages=2,
        schedule=schedule,
        microbatches=4,
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **options,
    )
    torch.manual_seed(1)
    batches = [(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(3)]
    return [step.loss for step in pipe.train(batches)], pipe.state_dict()


def test_the_name_builds_the_schedule_and_the_simulator_takes_it():
    built = penstock.schedule("waves", stages=2, microbatches=4, size=2)
    assert str(built) == "0F0,0F1,0B0,0B1,0F2,0F3,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3"
    assert penstock.check(built).ok
    # Two waves of 2 micro-batches on 2 ranks, forward 1 and backward 2: each takes 3 forwards and 3 backwards.
    line = penstock.simulate(built, forward=1.0, input_grad=1.0, weight_grad=1.0)
    assert line.makespan == 2 * (3 * 1 + 3 * 2)


def test_mini_batches_and_replicas_repeat_it():
    built = penstock.schedule("waves", stages=2, microbatches=2, batches=2, replicas=2)
    assert len(built.words()) == 4
    assert built.words()[0] == ["0F0", "0F1", "0B0", "0B1", "0F2@1", "0F3@1", "0B2@1", "0B3@1"]
    assert penstock.check(built).ok


def test_a_pipeline_trains_by_it_to_the_bits_of_gpipe():
    """Gradients are added in the same order: waves of all micro-batches' forwards, backwards first to last."""
    losses, state = trained("waves")
    others, reference = trained("gpipe")
    assert losses == pytest.approx(others, rel=1e-6)
    for name, value in state.items():
        assert torch.allclose(value, reference[name], atol=1e-6)
    assert trained("waves", size=1)[0] == pytest.approx(others, rel=1e-6)


def test_a_pipeline_switches_to_it():
    pipe = penstock.Pipeline(net(), example=torch.ones(1, 3), stages=2, loss=nn.functional.mse_loss)
    pipe.switch("waves", size=1)
    assert pipe.schedule.shape.name == "waves"


def test_the_planner_searches_it():
    layers = tuple(penstock.Layer(f"layer {k}", forward=1.0, input_grad=1.0, weight_grad=1.0) for k in range(4))
    cluster = penstock.Cluster.uniform((penstock.Level("host", 2, 1e9, 0.0),), penstock.Device("cpu"))
    profile = penstock.Profile(layers, samples=1)
    alone = penstock.plan(profile, cluster, schedules="waves", batch=4)
    assert alone.plan.schedule == "waves"
    every = penstock.plan(profile, cluster, batch=4)
    assert any(other.plan.schedule == "waves" for other in every.outcome.runners)


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda: penstock.register_schedule("1f1b")(waves), "a name of your own for the schedule, but got '1f1b'"),
        (lambda: penstock.register_schedule("mine")(3), "a function from a ScheduleRequest to a Schedule, but got int"),
        (lambda: penstock.register_schedule("mine", in_flight="some"), "in_flight to be 'depth' or 'all'"),
        (lambda: penstock.register_schedule(3), "the name of a schedule to be a text, but got 3"),
        (lambda: penstock.schedule("waves", stages=2, microbatches=4, sise=2), "got 'sise'; did you mean size?"),
        (lambda: penstock.schedule("1f1b", stages=2, microbatches=4, size=2), "options that 1f1b has"),
        (lambda: penstock.schedule("waves", stages=2, microbatches=4, chunks=2), "exactly 1 chunk"),
    ],
)
def test_a_wrong_registration_or_call(register, words):
    with pytest.raises(InputError, match=words):
        register()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda request: None, "a builder that returns a Schedule, but got NoneType from 'mine'"),
        (lambda request: request.schedule([["0F0", "0B0"]]), "one list of actions for each of 2 ranks, but got 1"),
        (
            lambda request: penstock.schedule("1f1b", stages=2, microbatches=5),
            "a schedule of microbatches 4, as the request says, but got 5 from 'mine'",
        ),
        (lambda request: request.schedule([["0F0"], ["1F0", "1B0"]]), "0F1 is missing; add it"),
    ],
)
def test_a_builder_that_does_not_do_what_was_asked(build, words):
    penstock.register_schedule("mine")(build)
    with pytest.raises(penstock.PenstockError, match=words):
        penstock.simulate(penstock.schedule("mine", stages=2, microbatches=4), forward=1.0)
