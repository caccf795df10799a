"""Mini-batches flow through without a flush: each is trained once, and whatever interrupts it only drains the pipe.

What is expected is the recursion in segments: from one drain to the next, over exactly the mini-batches that were taken
from the loader.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
import recursion_models
from penstock import InputError
from recursion_models import Model
from segments import (
    ADAMW,
    MOMENTUM,
    SGD,
    WITHIN,
    Batches,
    Method,
    Recursion,
    off,
    optimizer,
    pipeline,
    trained,
    weights,
)

torch.set_num_threads(1)

METHODS = [
    Method("pipedream"),
    Method("pipedream", 2, {"vertical_sync": True}),
    Method("pipedream", 1, {"stash": False}),
    Method("2bw", 4),
    Method("pipemare", 1, {"t1": 9}),
    Method("pipedream", 1, {"predict": "xpipe"}),
    Method("pipemare", 1, {"predict": "xpipe"}),
]
methods = pytest.mark.parametrize("method", METHODS, ids=str)


def chain(n: int = 3) -> Model:
    return recursion_models.chain(n, width=3, tied=(0, n - 1) if n > 1 else None)


class Loader:
    """Counts what is taken from it."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.taken = batches, 0

    def __iter__(self) -> Iterator:
        for batch in self.batches:
            self.taken += 1
            yield batch


class Both:
    """A pipeline, and the recursion that follows it from drain to drain."""

    def __init__(self, method: Method, rule=MOMENTUM, n: int = 3, count: int = 12, **more) -> None:
        self.model = chain(n)
        self.loader = Loader(self.model.batches(count, rows=4))
        self.pipe = pipeline(self.model, method, rule, **more)
        self.reference = Recursion(self.model, method, rule, more.get("clip"))
        self.losses: list[float] = []
        self.done = 0

    def drained(self) -> None:
        """All that was taken is trained by now."""
        now = self.loader.taken
        assert self.pipe.index == self.reference.updates + now - self.done
        self.losses += self.reference.run(self.loader.batches[self.done : now])
        self.done = now
        self.same()

    def same(self) -> None:
        assert off(weights(self.pipe), self.reference.weights()) < WITHIN


@settings(max_examples=14, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 4), st.integers(0, 9))
def test_one_record_a_mini_batch_in_order(method, n, count):
    """Also for fewer mini-batches than stages, and for none."""
    both = Both(method, n=n, count=count)
    records = list(both.pipe.train(both.loader))
    both.drained()
    assert [record.index for record in records] == list(range(count))
    assert [record.loss for record in records] == pytest.approx(both.losses, abs=WITHIN)
    assert both.pipe.index == count


@methods
def test_a_record_comes_when_its_mini_batch_is_through(method):
    """No more are taken in than the stages hold, and nothing waits for the end of the loader."""
    both = Both(method)
    in_flight = [both.loader.taken - record.index for record in both.pipe.train(both.loader)]
    ahead = -(-2 // method.m)  # mini-batches that two micro-batches ahead reach into
    assert in_flight[: 12 - ahead] == [1 + ahead] * (12 - ahead)


EVENTS: dict[str, Callable[[Both], object]] = {
    "evaluate": lambda both: both.pipe.evaluate(both.loader.batches[:1]),
    "forward": lambda both: both.pipe.forward(both.loader.batches[0][0]),
    "state_dict": lambda both: both.pipe.state_dict(),
    "load_state_dict": lambda both: both.pipe.load_state_dict(both.pipe.state_dict()),
    "settle": lambda both: both.pipe.settle(),
}


@settings(max_examples=16, deadline=None)
@given(
    st.sampled_from(METHODS),
    st.dictionaries(st.integers(0, 9), st.sampled_from(["step", *EVENTS]), max_size=4),
    st.integers(2, 4),
)
@example(Method("pipedream", options={"predict": "xpipe"}), {0: "load_state_dict"}, 2)
@example(Method("pipemare"), {3: "load_state_dict"}, 3)
def test_whatever_is_asked_in_between_drains_and_loses_nothing(method, events, n):
    both = Both(method, n=n, count=10, rule=ADAMW)
    extra, found = both.model.batches(1, rows=4, seed=9)[0], []
    for record in both.pipe.train(both.loader):
        found.append(record.loss)
        what = events.get(len(found) - 1)
        if what == "step":
            loss = both.pipe.step(*extra).loss
            both.reference.run(both.loader.batches[both.done : both.loader.taken])
            both.done = both.loader.taken
            assert both.reference.step(extra) == pytest.approx(loss, abs=WITHIN)
            both.same()
        elif what is not None:
            EVENTS[what](both)
            both.drained()
    both.reference.run(both.loader.batches[both.done :])
    both.same()
    assert len(found) == 10
    assert both.pipe.index == 10 + sum(what == "step" for at, what in events.items())


def test_records_that_a_drain_brings_out_are_handed_on_in_order():
    both, found = Both(METHODS[0]), []
    for record in both.pipe.train(both.loader):
        found.append(record)
        if record.index == 4:
            both.pipe.evaluate(both.loader.batches[:1])
            both.drained()
    both.drained()
    assert [record.index for record in found] == list(range(12))
    assert [record.loss for record in found] == pytest.approx(both.losses, abs=WITHIN)


def test_an_evaluation_scores_the_newest_weights():
    both, batch = Both(METHODS[0]), chain().batches(1, rows=4, seed=5)[0]
    for record in both.pipe.train(both.loader):
        if record.index == 6:
            found = both.pipe.evaluate([batch])
            with torch.no_grad():
                assert found == pytest.approx(both.model.loss(both.model.module(batch[0]), batch[1]).item(), abs=1e-12)


@pytest.mark.parametrize("method", [METHODS[1], METHODS[3]], ids=str)
def test_a_checkpoint_is_written_after_a_drain_and_training_goes_on_from_it(method, tmp_path):
    both = Both(method, rule=ADAMW)
    for record in both.pipe.train(both.loader):
        if record.index == 5:
            both.pipe.save(tmp_path / "here")
            both.drained()
            break
    taken = both.loader.taken
    other = pipeline(chain(), method, ADAMW)
    other.load(tmp_path / "here")
    assert other.index == taken
    trained(other, both.loader.batches[taken:])
    both.reference.run(both.loader.batches[taken:])
    assert off(weights(other), both.reference.weights()) < WITHIN


@pytest.mark.parametrize(
    ("way", "method"),
    [*(("break", method) for method in METHODS), *((way, METHODS[0]) for way in ("raise", "close", "let go"))],
)
def test_leaving_the_loop_early_trains_what_was_taken_in(way, method):
    both = Both(method)
    if way == "break":
        for record in both.pipe.train(both.loader):
            if record.index == 4:
                break
    elif way == "raise":
        with pytest.raises(ZeroDivisionError):
            [1 / (4 - record.index) for record in both.pipe.train(both.loader)]
    else:
        records = both.pipe.train(both.loader)
        for _ in range(5):
            next(records)
        records.close() if way == "close" else None
        del records
    assert 5 < both.loader.taken < 10
    both.drained()
    rest = Loader(both.loader.batches[both.loader.taken :])
    indices = [record.index for record in both.pipe.train(rest)]
    assert indices == list(range(both.loader.taken, 12))
    both.reference.run(rest.batches)
    both.same()


def test_before_the_first_record_nothing_happens():
    both = Both(METHODS[0])
    records = both.pipe.train(both.loader)
    assert both.loader.taken == 0
    records.close()
    both.drained()


def test_two_loops_at_once_are_refused_and_the_second_goes_on():
    both = Both(METHODS[0])
    first = both.pipe.train(both.loader)
    next(first)
    both.pipe.settle()
    both.drained()
    other = Loader(both.model.batches(8, rows=4, seed=3))
    second = both.pipe.train(other)
    next(second)
    with pytest.raises(InputError, match=r"one loop over pipe\.train at a time.*another that was begun inside it"):
        next(first)
    assert len(list(second)) == 7
    both.reference.run(other.batches)
    both.same()
    assert list(first) == []  # it has ended


@methods
def test_a_loader_that_raises(method):
    both = Both(method)

    def broken() -> Iterator:
        for number, batch in enumerate(both.loader):
            if number == 7:
                both.loader.taken -= 1  # that one was never handed out
                raise OSError("no more disk")
            yield batch

    with pytest.raises(OSError, match="no more disk"):
        trained(both.pipe, broken())
    both.drained()
    assert both.pipe.index == 7
    trained(both.pipe, both.loader.batches[7:])
    both.reference.run(both.loader.batches[7:])
    both.same()


@methods
def test_a_batch_that_cannot_be_used_is_refused_when_it_is_met(method):
    both = Both(replace(method, m=max(method.m, 2)))
    x, y = both.loader.batches[7]
    both.loader.batches[7] = (x[:2], y[:1])
    with pytest.raises(InputError, match=r"the same number of rows, but got \[1, 2\]"):
        trained(both.pipe, both.loader)
    both.loader.taken -= 1
    both.drained()


def whole_versions(both: Both) -> dict[int, int]:
    """By stage, the version that its weights are: all of them the same one."""
    both.reference.run(both.loader.batches)
    found: dict[int, set[int]] = {}
    for name, weight in weights(both.pipe).items():
        place = both.model.places[name]
        near = [at for at, w in enumerate(both.reference.history[place]) if (w - weight).abs().max() < WITHIN]
        found.setdefault(place[0], set()).update(near)
        assert len(near) == 1, f"{name} is no version"
    assert all(len(versions) == 1 for versions in found.values())
    return {stage: versions.pop() for stage, versions in found.items()}


@methods
def test_a_loss_that_is_no_number(method):
    """One message; all stages have the updates of the mini-batches before, and the pipe can be filled again."""
    both = Both(method, rule=SGD)
    x, y = both.loader.batches[7]
    broken = [*both.loader.batches[:7], (x * torch.nan, y), *both.loader.batches[8:]]
    found: list[int] = []
    with pytest.raises(InputError, match="a finite loss, but got nan"):
        found.extend(record.index for record in both.pipe.train(broken))
    assert found == list(range(len(found)))
    assert both.pipe.index == 7
    both.reference.run(both.loader.batches[:7])
    both.same()
    rest = both.loader.batches[8:12]
    assert trained(both.pipe, rest) == pytest.approx(both.reference.run(rest), abs=WITHIN)
    both.same()


class NoSuchLuckError(Exception):
    pass


def fail_at(both: Both, stage: int, call: int, backward: bool) -> Callable[[], None]:
    """Let a layer of a stage fail at its so many-th call from now; what is returned undoes it."""
    calls = 0

    def once(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise NoSuchLuckError

    layer = both.pipe.model[stage]
    return ([*layer.parameters()][-1].register_hook if backward else layer.register_forward_pre_hook)(once).remove


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("stage", [0, 1, 2])
@methods
def test_an_exception_in_a_forward_leaves_all_stages_at_one_mini_batch(method, stage, clip):
    """All stages have the updates of the mini-batches before it, and training goes on from there."""
    both = Both(method, clip=clip)
    undo = fail_at(both, stage, 6 * method.m + 1, False)
    with pytest.raises(NoSuchLuckError):
        trained(both.pipe, both.loader)
    undo()
    assert both.pipe.index == 6
    both.reference.run(both.loader.batches[:6])
    both.same()
    rest = both.loader.batches[7:]
    assert trained(both.pipe, rest) == pytest.approx(both.reference.run(rest), abs=WITHIN)
    both.same()


@pytest.mark.parametrize("stage", [0, 1, 2])
@methods
def test_an_exception_in_a_backward_does_so_too_or_ends_the_pipeline(method, stage):
    """Later stages may have made the update of that mini-batch already: then nobody goes on with what is left."""
    both = Both(method)
    undo = fail_at(both, stage, 6 * method.m + 1, True)
    with pytest.raises(NoSuchLuckError):
        trained(both.pipe, both.loader)
    undo()
    both.reference.run(both.loader.batches[: both.pipe.index])
    if stage == 2 or method.schedule == "2bw":
        assert both.pipe.index == 6
        both.same()
        rest = both.loader.batches[7:]
        assert trained(both.pipe, rest) == pytest.approx(both.reference.run(rest), abs=WITHIN)
        both.same()
        return
    for use in EVENTS.values():
        with pytest.raises(InputError, match="some stages may have an update that others lack, as something has fail"):
            use(both)


def test_an_exception_before_the_first_update_leaves_everything_as_it_was():
    both = Both(METHODS[0])
    before, undo = weights(both.pipe), fail_at(both, 1, 1, False)
    with pytest.raises(NoSuchLuckError):
        trained(both.pipe, both.loader)
    undo()
    assert both.pipe.index == 0
    assert off(weights(both.pipe), before) == 0
    trained(both.pipe, both.loader.batches)
    both.reference.run(both.loader.batches)
    both.same()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # all that Python makes of it
def test_a_loss_that_is_no_number_in_what_is_trained_when_the_loop_is_left_is_told_by_the_next_use():
    for use in EVENTS.values():
        both = Both(METHODS[0], rule=SGD)
        x, y = both.loader.batches[5]
        both.loader.batches[5] = (x * torch.nan, y)
        for record in both.pipe.train(both.loader):
            if record.index == 3:
                break
        assert both.loader.taken == 6
        with pytest.raises(InputError, match="a finite loss, but got nan"):
            use(both)
        use(both)  # once is enough
        assert all(weight.isfinite().all() for weight in weights(both.pipe).values())


def test_a_loss_that_is_no_number_under_2bw():
    for clip in (None, 0.5):
        both = Both(Method("2bw", 4), rule=SGD, clip=clip)
        x, y = both.loader.batches[7]
        with pytest.raises(InputError, match="a finite loss"):
            trained(both.pipe, [*both.loader.batches[:7], (x * torch.nan, y), *both.loader.batches[8:]])
        assert set(whole_versions(both).values()) == {7}


def test_gradients_that_are_no_numbers_are_told_with_clipping():
    model = chain(2)
    pipe = pipeline(model, Method("pipedream"), SGD, clip=1.0)
    pipe.loss = lambda out, target: (out * 0).abs().sum().sqrt()  # 0, with an infinite slope
    with pytest.raises(InputError, match="finite gradients, but got"):
        trained(pipe, model.batches(3, rows=2))
    assert all(torch.isfinite(weight).all() for weight in weights(pipe).values())
    pipe.loss = model.loss
    assert len(trained(pipe, model.batches(3, rows=2))) == 3


SYNCHRONOUS = [Method("pipedream", 2), Method("2bw", 4), METHODS[4], METHODS[6]]


@pytest.mark.parametrize(("method", "clip"), [(METHODS[0], None), *((method, 0.2) for method in SYNCHRONOUS)])
def test_a_single_step_is_a_synchronous_one(method, clip):
    """Loss, norm over all stages, weights: those of 1f1b."""
    one, other = chain(), chain()
    pipe = pipeline(one, method, ADAMW, clip=clip)
    plain = pipeline(other, Method("1f1b", method.m), ADAMW, clip=clip)
    for batch in one.batches(6, rows=4):
        found, wanted = pipe.step(*batch), plain.step(*batch)
        assert (found.index, found.updated) == (wanted.index, wanted.updated)
        assert found.loss == pytest.approx(wanted.loss, abs=1e-13)
        assert found.gradient_norm == (wanted.gradient_norm and pytest.approx(wanted.gradient_norm, abs=1e-13))
        assert off(weights(pipe), weights(plain)) < 1e-13


@pytest.mark.parametrize("method", SYNCHRONOUS, ids=str)
def test_t3_trains_the_first_mini_batches_synchronously(method):
    """Exactly as 1f1b does, clipping by the norm of all and T1 not begun; then without a flush."""
    both = Both(Method(method.schedule, method.m, {**method.options, "t3": 5}), rule=ADAMW, clip=0.3)
    other = chain()
    plain = pipeline(other, Method("1f1b", method.m), ADAMW, clip=0.3)
    for number, record in enumerate(both.pipe.train(both.loader)):
        if number < 5:
            assert both.loader.taken == number + 1
            assert record.loss == pytest.approx(plain.step(*both.loader.batches[number]).loss, abs=1e-13)
            assert off(weights(both.pipe), weights(plain)) < 1e-13
            assert both.reference.step(both.loader.batches[number]) == pytest.approx(record.loss, abs=1e-12)
    both.reference.run(both.loader.batches[5:])
    both.same()


def test_t3_counts_over_several_loops():
    both = Both(Method("pipedream", 1, {"t3": 5}))
    for begin, end in ((0, 3), (3, 9)):
        assert len(trained(both.pipe, both.loader.batches[begin:end])) == end - begin
    for batch in both.loader.batches[:5]:
        both.reference.step(batch)
    both.reference.run(both.loader.batches[5:9])
    both.same()


def test_gradients_that_somebody_left_are_there_again():
    both = Both(METHODS[0])
    marks = [torch.full_like(p, 7.0) for p in both.model.module.parameters()]
    for parameter, mark in zip(both.model.module.parameters(), marks, strict=True):
        parameter.grad = mark
    for record in both.pipe.train(both.loader):
        if record.index == 4:
            break
    both.drained()
    assert all(p.grad is mark for p, mark in zip(both.model.module.parameters(), marks, strict=True))
    assert all((mark == 7).all() for mark in marks)


@methods
def test_weights_that_somebody_changes_between_two_loops_count(method):
    """In place, or by giving a parameter other memory."""
    both = Both(method, rule=SGD)
    trained(both.pipe, both.loader.batches[:6])
    both.reference.run(both.loader.batches[:6])
    with torch.no_grad():
        for number, (name, parameter) in enumerate(both.model.module.named_parameters()):
            place = both.model.places[name]
            both.reference.history[place][-1] = both.reference.history[place][-1] * 0.5
            if number % 2:
                parameter.mul_(0.5)
            else:
                parameter.data = parameter.data * 0.5
    both.same()
    if method.schedule == "pipemare" or "predict" in method.options:
        return  # a step that nobody took is no part of what they know
    both.reference.run(both.loader.batches[6:])
    trained(both.pipe, both.loader.batches[6:])
    both.same()


@pytest.mark.parametrize(
    "options", [{}, {"vertical_sync": True}, {"predict": "xpipe"}, {"predict": "spectrain"}], ids=str
)
def test_stages_without_weights(options):
    """In the middle, at the end, or with none but another stage's: three linears, and the same as two stages less."""
    torch.manual_seed(0)
    first, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    model = nn.Sequential(first, nn.Tanh(), last, nn.Sequential(nn.Flatten(), nn.Identity()))
    batches = [(torch.randn(4, 3).double(), torch.randn(4, 3).double()) for _ in range(8)]
    for schedule, m, more in (("pipedream", 1, options), ("2bw", 4, {"clip": 1.0}), ("pipemare", 2, {"t1": 3})):
        pipe = penstock.Pipeline(
            model, example=batches[0][0], stages=4, cuts=["1", "2", "3"], schedule=schedule, microbatches=m,
            loss=F.mse_loss, optimizer=optimizer(MOMENTUM), verify=False, **more,
        )  # fmt: skip
        before = weights(pipe)["0.weight"].clone()
        assert len(trained(pipe, batches)) == 8
        assert not weights(pipe)["0.weight"].equal(before)


def test_a_script_that_ends_inside_its_loop_says_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom torch import nn\nimport penstock\n"
        "pipe = penstock.Pipeline(\n"
        "    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), example=torch.ones(2, 4), stages=2,\n"
        "    schedule='pipedream', microbatches=1, loss=nn.functional.mse_loss,\n"
        "    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        ")\n"
        "records = pipe.train([(torch.ones(2, 4), torch.zeros(2, 4))] * 9)\n"
        "print(next(records).index, next(records).index)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")
