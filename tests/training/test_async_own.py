"""A user's own schedule without a flush, against a plain recursion that is told by hand which version a forward uses.

The list is repeated: it drains at its end, and the next mini-batches find all that it has made.
"""

from __future__ import annotations

import pytest
import torch

import penstock
import recursion_models
import recursions
from distributed import brought
from penstock import InputError, Pipeline, ScheduleError
from recursions import Law

torch.set_num_threads(1)

# By stage, the version that each forward of one list uses, as the lists in `brought` draw it.
VERSIONS = {
    "stash": ((0, 0, 2, 2), (0, 1, 2, 3)),
    "vertical": ((0, 0, 2, 2), (0, 0, 2, 2)),
    "newest": ((0, 0, 2, 2), (0, 1, 2, 3)),
}


def law_of(law: str) -> Law:
    if law == "2bw":
        return Law(lambda stage, t: max(t // 2 - 1, 0), together=True)
    return Law(lambda stage, t: VERSIONS[law][stage][t % 4] + t // 4 * 4, newest=law == "newest")


@pytest.mark.parametrize("law", brought.OWN)
def test_losses_and_weights_are_those_of_the_recursion(law):
    assert penstock.check(brought.own(law)).ok
    model = recursion_models.chain(2, layers=4, width=3)
    rule = recursions.SGD(0.05, 0.9)
    job = recursions.Job(model.stages, model.batches(10, rows=3), model.loss, rule, m=2 if law == "2bw" else 1)
    wanted = recursions.train(job, law_of(law))
    found = brought.own_without_a_flush(2)[law]
    assert found["losses"] == pytest.approx(wanted.losses, abs=1e-10)
    for name, weight in model.named(wanted.weights).items():
        assert torch.allclose(torch.tensor(found["weights"][name], dtype=weight.dtype), weight, rtol=0, atol=1e-10), (
            name
        )
    plain = recursions.train(job, Law(lambda stage, t: t // job.m, together=True))
    assert max(abs(a - b) for a, b in zip(plain.losses, wanted.losses, strict=True)) > 1e-6  # delays show


def pipeline(schedule: penstock.Schedule, **options) -> Pipeline:
    model = recursion_models.chain(2, layers=4, width=3)
    return Pipeline(
        model.module, example=model.batches(1, 2)[0][0], cuts=["1"], schedule=schedule, loss=model.loss, verify=False,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05), **options,
    )  # fmt: skip


def test_a_list_of_a_named_method_drains_at_its_end():
    """What `penstock.schedule` makes is such a list; `penstock.loop` goes on for ever."""
    model = recursion_models.chain(2, layers=4, width=3)
    batches = model.batches(6, rows=2)
    pipe = pipeline(penstock.schedule("pipedream", stages=2, batches=3))
    losses = [step.loss for step in pipe.train(batches)]
    wanted = pipeline(penstock.loop("pipedream", stages=2))
    plain = [step.loss for part in (batches[:3], batches[3:]) for step in wanted.train(part)]  # drained in between
    assert losses == plain


def test_a_lowered_list_is_taken_as_long_as_it_is_what_lowering_makes():
    batches = recursion_models.chain(2, layers=4, width=3).batches(5, rows=2)
    wanted = [step.loss for step in pipeline(brought.own("stash")).train(batches)]
    lowered = penstock.lower(brought.own("stash"))
    assert [step.loss for step in pipeline(lowered).train(batches)] == wanted
    slots = [list(lowered.actions(slot)) for slot in range(2)]
    for at, action in enumerate(slots[0]):
        if str(action) == "0B1<1":  # a receive that comes earlier than it has to
            slots[0][at - 1], slots[0][at] = slots[0][at], slots[0][at - 1]
            break
    other = penstock.Schedule.of_slots(lowered.shape, slots, lowered=True)
    assert other != lowered
    assert penstock.check(other).ok
    with pytest.raises(InputError, match="give its compute actions alone, and let us add the rest"):
        pipeline(other)


def test_a_list_that_breaks_its_law_is_refused():
    broken = penstock.from_csv("# law: stash\n# microbatches: 1\n# batches: 2\n0F0,0B0,0F1,0B1\n1F0,1B0,1F1@1,1B1@1\n")
    with pytest.raises(ScheduleError, match="asks for 1"):
        pipeline(broken)


def test_several_synchronous_mini_batches_are_refused():
    with pytest.raises(InputError, match=r"a synchronous schedule of one mini-batch.*'1f1b' of 2; give"):
        pipeline(penstock.schedule("1f1b", stages=2, microbatches=2, batches=2))


def test_a_pipeline_goes_on_by_an_own_schedule_and_back():
    model = recursion_models.chain(2, layers=4, width=3)
    batches = model.batches(4, rows=2)
    pipe = pipeline(penstock.schedule("1f1b", stages=2, microbatches=2))
    one = [step.loss for step in pipe.train(batches)]
    pipe.switch(brought.own("stash"))
    two = [step.loss for step in pipe.train(batches)]
    pipe.switch("1f1b", microbatches=2)
    three = [step.loss for step in pipe.train(batches)]
    assert one[0] > two[0] > three[0]
    assert pipe.index == 12
