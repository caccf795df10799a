"""From one schedule to another between two mini-batches: training goes on as if it had been done in segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import penstock
import recursion_models
from penstock import InputError
from segments import ADAMW, SGD, WITHIN, Method, Recursion, off, pipeline, trained, weights

torch.set_num_threads(1)

METHODS = [
    Method("1f1b", 2),
    Method("gpipe", 4),
    Method("pipedream"),
    Method("pipedream", 2, {"vertical_sync": True}),
    Method("2bw", 3),
    Method("pipemare", 1),
    Method("pipemare", 2, {"predict": "xpipe"}),
]
DECAY = 0.93


class Both:
    """A pipeline and the recursion that goes along, by AdamW, clipped, with a learning rate that falls."""

    def __init__(self, method: Method, **more) -> None:
        self.model = recursion_models.chain(3, width=3, tied=(0, 2))
        given = {"clip": 0.5, "lr_scheduler": lambda optimizer: ExponentialLR(optimizer, DECAY)} | more
        self.pipe = pipeline(self.model, method, ADAMW, **given)
        self.reference = Recursion(self.model, method, ADAMW, clip=0.5, decay=DECAY)
        self.batches = iter(self.model.batches(40, rows=4))

    def train(self, count: int) -> None:
        batches = [next(self.batches) for _ in range(count)]
        assert trained(self.pipe, batches) == pytest.approx(self.reference.run(batches), abs=WITHIN)

    def switch(self, method: Method) -> None:
        self.pipe.switch(method.schedule, microbatches=method.m, **method.options)
        self.reference.switch(method)

    def same(self) -> None:
        assert off(weights(self.pipe), self.reference.weights()) < WITHIN


def test_through_all_of_them_and_back():
    both = Both(METHODS[0])
    for method in [*METHODS, *METHODS[::-1]]:
        both.switch(method)
        both.train(2 if method.schedule in ("1f1b", "gpipe") else 3)
        both.same()
    assert both.pipe.index == both.reference.updates


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(METHODS), st.integers(0, 5)), min_size=1, max_size=4))
def test_in_any_order(plan):
    both = Both(METHODS[2])
    for method, count in plan:
        both.train(count)
        both.switch(method)
    both.train(3)
    both.same()


@pytest.mark.parametrize("first", [METHODS[0], METHODS[2], METHODS[4]], ids=str)
@pytest.mark.parametrize("then", [METHODS[1], METHODS[3], METHODS[5]], ids=str)
def test_inside_a_loop_the_rest_is_trained_by_the_new_schedule(first, then):
    """And back: one record a batch, in order, none lost."""
    both, taken, cuts, found = Both(first), [], [], []

    def loader():
        for batch in both.model.batches(14, rows=4):
            taken.append(batch)
            yield batch

    for record in both.pipe.train(loader()):
        found.append(record)
        if record.index in (4, 9):
            method = then if record.index == 4 else first
            both.pipe.switch(method.schedule, microbatches=method.m, **method.options)
            cuts.append((len(taken), method))
    losses = both.reference.run(taken[: cuts[0][0]])
    both.reference.switch(then)
    losses += both.reference.run(taken[cuts[0][0] : cuts[1][0]])
    both.reference.switch(first)
    losses += both.reference.run(taken[cuts[1][0] :])
    both.same()
    assert [record.index for record in found] == list(range(14))
    assert [record.loss for record in found] == pytest.approx(losses, abs=WITHIN)


def test_optimizers_and_schedulers_stay_the_same_objects():
    both = Both(METHODS[0])
    optimizers, schedulers = dict(both.pipe.optimizers.optimizers), list(both.pipe.optimizers.schedulers)
    for method in (METHODS[2], METHODS[4], METHODS[0]):
        both.switch(method)
        both.train(3)
    assert both.pipe.optimizers.optimizers == optimizers
    assert both.pipe.optimizers.schedulers == schedulers
    for optimizer in optimizers.values():
        assert optimizer.param_groups[0]["lr"] == pytest.approx(ADAMW.lr * DECAY**9)
        assert {float(state["step"]) for state in optimizer.state.values()} == {9}


@pytest.mark.parametrize("method", METHODS[2:6], ids=str)
def test_a_scheduler_that_watches_the_loss_sees_that_of_the_mini_batch(method):
    """Once an update, on each stage."""

    class Spy(ReduceLROnPlateau):
        def __init__(self, optimizer):
            super().__init__(optimizer)
            self.seen = []

        def step(self, metrics, epoch=None):
            self.seen.append(metrics)
            super().step(metrics)

    model = recursion_models.chain(3, width=3)
    pipe = pipeline(model, method, ADAMW, lr_scheduler=Spy)
    losses = trained(pipe, model.batches(7, rows=4))
    for scheduler in pipe.optimizers.schedulers:
        assert scheduler.seen == pytest.approx(losses, abs=1e-14)


@pytest.mark.parametrize("first", ["1f1b", "pipedream"])
@pytest.mark.parametrize("call", ["switch", "save", "state_dict", "evaluate", "forward"])
def test_inside_a_mini_batch_it_is_refused(first, call, tmp_path):
    both = Both(Method(first, 2))
    given = {"switch": ["gpipe"], "save": [tmp_path / "here"], "state_dict": []}.get(call, [[]])
    loss, caught = both.pipe.loss, []

    def calling(out, target):
        if not caught:
            with pytest.raises(InputError, match="between two mini-batches, but got one inside a mini-batch"):
                getattr(both.pipe, call)(*given)
            caught.append(True)
        return loss(out, target)

    both.pipe.loss = calling
    both.train(4)
    assert caught
    both.same()


def test_t1_and_t3_count_from_the_switch():
    """As if the training had begun there: on weights and an optimizer without history the same bits."""
    model = recursion_models.chain(3, width=3)
    late, fresh = (pipeline(model, Method("1f1b", 1), SGD) for _ in range(2))
    batches = list(model.batches(16, rows=4))
    late.index = 7  # of a training before
    for pipe in (late, fresh):
        pipe.switch("pipemare", microbatches=1, t1=6, t3=2)
        trained(pipe, batches)
    assert off(weights(late), weights(fresh)) == 0


def test_while_an_accumulation_is_pending_it_is_refused():
    model = recursion_models.chain(3, width=3)
    pipe = pipeline(model, Method("1f1b", 2), ADAMW, accumulate=2)
    batches = model.batches(2, rows=4)
    pipe.step(*batches[0])
    with pytest.raises(InputError, match="inside a mini-batch, whose accumulation is not finished"):
        pipe.switch("gpipe")
    pipe.step(*batches[1])
    pipe.switch("gpipe")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("interleaved", {"microbatches": 3}, "a schedule for 3 stages placed on ranks .0, 1, 2., but got interleaved"),
        ("zb-v", {}, "a schedule for 3 stages placed on ranks .0, 1, 2., but got zb-v"),
        ("interleaved", {"chunks": 2}, "options of the schedule's own method, but got chunks; leave it out"),
        ("1f1b", {"stages": 2}, "options of the schedule's own method, but got stages; leave it out"),
        ("2bw", {"microbatches": 2}, "microbatches to be at least its depth of 3 stages, but got 2"),
        ("pipedreem", {}, "the name of a method, but got 'pipedreem'; try pipedream"),
        ("1f1b", {"t1": 3}, "an asynchronous schedule for t1, but got '1f1b'"),
        ("pipemare", {"t2": 2.0}, "t2 to be True, or a decay D between 0 and 1, but got 2.0"),
        ("pipedream", {"depth": 2}, "arguments that Pipeline.switch takes, but got 'depth'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", [METHODS[0], METHODS[2]], ids=str)
def test_a_schedule_that_does_not_fit_is_refused_and_nothing_changes(first, name, options, words):
    both = Both(first)
    both.train(3)
    with pytest.raises(InputError, match=words):
        both.pipe.switch(name, **options)
    both.same()
    both.train(3)
    both.same()


def test_a_loop_of_the_users_own_and_one_for_other_stages():
    both = Both(METHODS[0])
    both.train(2)
    with pytest.raises(InputError, match="a schedule of 3 stages, but got 2"):
        both.pipe.switch(penstock.loop("pipedream", stages=2), microbatches=1)
    both.pipe.switch(penstock.loop("pipedream", stages=3), microbatches=1)
    both.reference.switch(METHODS[2])
    both.train(6)
    both.same()


def test_a_run_that_is_in_flight_when_it_is_refused_goes_on():
    both = Both(METHODS[2])
    batches, found = both.model.batches(9, rows=4), []
    for record in both.pipe.train(batches):
        found.append(record.loss)
        if record.index == 3:
            with pytest.raises(InputError, match="the name of a method"):
                both.pipe.switch("nothing of the kind")
    assert found == pytest.approx(both.reference.run(batches), abs=WITHIN)
    both.same()
