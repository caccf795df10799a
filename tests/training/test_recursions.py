"""The recursions by themselves: against autograd, against cases worked out by hand, against the theory of delays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import exp

import pytest
import torch
from torch import Tensor, nn

import quadratic
import recursion_models
from quadratic import Delays
from recursion_models import Model
from recursions import (
    SGD,
    AdamW,
    D,
    Job,
    Law,
    Op,
    Trained,
    Versions,
    mini_batch,
    no_stash,
    pipemare,
    places,
    stashing,
    synchronous,
    two_bw,
    vertical_sync,
)

MODELS: dict[str, Callable[[int], Model]] = {
    "chain": lambda n: recursion_models.chain(n, layers=4),
    "tied chain": lambda n: recursion_models.chain(n, layers=4, tied=(0, 2)),
    "conv": lambda n: recursion_models.conv_net(n, layers=3),
    "gpt": lambda n: recursion_models.gpt(n, layers=3, tied=False),
    "tied gpt": lambda n: recursion_models.gpt(n, layers=3),
}
METHODS = {
    "stashing": stashing,
    "vertical sync": vertical_sync,
    "no stashing": no_stash,
    "2BW": two_bw,
    "PipeMare": lambda job: pipemare(job, t1=4),
}


def close(found: dict, wanted: dict, within: float = 1e-12) -> bool:
    return found.keys() == wanted.keys() and all((found[k] - wanted[k]).abs().max() <= within for k in wanted)


def plainly(model: Model, batches: list, make: Callable, clip: float | None = None) -> tuple[list, dict]:
    """Ordinary training of the module by autograd and torch's own optimizer."""
    module = copy.deepcopy(model.module)
    optimizer, losses = make(module.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = model.loss(module(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("m", [1, 3, 9])
@pytest.mark.parametrize("kind", MODELS)
def test_the_ops_have_the_gradient_of_the_module(kind, m):
    model = MODELS[kind](3)
    x, y = model.batches(1, rows=7)[0]
    versions = Versions(Job(model.stages, [(x, y)], model.loss, SGD(0.1), m=m), Law(lambda stage, t: 0))
    loss, gradients = mini_batch(versions, 0, x, y)
    wanted = model.loss(model.module(x), y)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=1e-13)
    assert close(model.named(gradients), {name: p.grad for name, p in model.module.named_parameters()})
    assert all(p.grad.abs().max() > 1e-6 for p in model.module.parameters())


def test_stages_of_ops_do_not_follow_the_module_when_it_trains():
    model = recursion_models.gpt(2)
    before = [weight.clone() for _, weight in places(model.stages)]
    with torch.no_grad():
        for p in model.module.parameters():
            p.zero_()
    assert all(a.equal(weight) for a, (_, weight) in zip(before, places(model.stages), strict=True))


@pytest.mark.parametrize("kind", ["chain", "conv", "gpt"])
def test_a_backward_with_other_weights_is_what_autograd_does_when_its_saved_weights_are_replaced(kind):
    model = MODELS[kind](3)
    batches = model.batches(2, rows=5)
    job = Job(model.stages, batches, model.loss, SGD(0.1))
    versions = Versions(job, Law(lambda stage, t: 0, newest=True))  # mini-batch 1: forward 0, backward 1
    for history in versions.history.values():
        history.append(history[0] + 0.3 * torch.randn_like(history[0]))
    _, found = mini_batch(versions, 1, *batches[1])
    others = model.named({place: history[1] for place, history in versions.history.items()})
    wanted = swapped_gradients(model, *batches[1], others)
    assert close(model.named(found), wanted)
    _, usual = mini_batch(versions, 0, *batches[1])
    assert not close(model.named(usual), wanted, within=1e-4)


def swapped_gradients(model: Model, x: Tensor, y: Tensor, others: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's gradients, with each weight that autograd kept, or a view of it, exchanged for another."""
    held = {p.untyped_storage().data_ptr(): others[name] for name, p in model.module.named_parameters()}

    def unpack(kept: Tensor) -> Tensor:
        other = held.get(kept.untyped_storage().data_ptr())
        return kept if other is None else other.as_strided(kept.shape, kept.stride(), kept.storage_offset())

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = model.loss(model.module(x), y)
    found = torch.autograd.grad(loss, list(model.module.parameters()))
    return dict(zip(others, found, strict=True))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (SGD(0.1, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ],
)
def test_without_delay_every_method_is_plain_training(rule, make, clip):
    model = recursion_models.gpt(1, layers=2)
    batches = model.batches(4, rows=6)
    losses, weights = plainly(model, batches, make, clip)
    job = Job(model.stages, batches, model.loss, rule, m=2, clip=clip, predict="xpipe")
    for method in (synchronous, stashing, vertical_sync, no_stash, pipemare):
        found = method(job)
        assert found.losses == pytest.approx(losses, abs=1e-11)
        assert close(model.named(found.weights), weights, within=1e-10)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_method_trains_every_model(kind, name):
    """It runs to the end, its weights stay sound, and they are not those of plain training or without a forecast."""
    model = MODELS[kind](3)
    job = Job(model.stages, model.batches(3, rows=5), model.loss, SGD(0.05), m=2, clip=1.0)
    runs = [METHODS[name](job), METHODS[name](replace(job, predict="xpipe")), synchronous(job)]
    for found in runs:
        assert len(found.losses) == 3
        assert all(len(versions) == 4 and versions[-1].isfinite().all() for versions in found.history.values())
    for one, other in combinations(runs, 2):
        assert not close(one.weights, other.weights, within=1e-6)


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_the_versions_are_those_that_a_stage_has_when_it_runs(m):
    """1F1B without flush, stage by stage: warm-up forwards, then F and B in turn; an update after every m-th B."""
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    n, count = 4, 6 * m
    for stage in range(n):
        warm, forwards = n - 1 - stage, {}
        for turn in range(count + warm):
            if turn < count:
                forwards[turn] = max(0, turn - warm) // m  # backwards that have run, in whole mini-batches
            if turn >= warm:
                seen[stage, turn - warm] = (forwards[turn - warm], (turn - warm) // m)
    stages = [[scale(1.0)] for _ in range(n)]
    used = spied(no_stash, stages, m, count // m)
    assert used == seen


def spied(method: Callable[[Job], Trained], stages: list[list[Op]], m: int, count: int) -> dict:
    """(stage, micro-batch) -> the versions of its forward and of its backward, told by the values themselves."""
    calls: list[list[float]] = [[] for _ in stages]

    def listening(stage: int, op: Op) -> Op:
        def run(carried, weights):
            calls[stage].append(weights["w"].item())
            return op.run(carried, weights)

        return Op(run, op.weights)

    heard = [[listening(s, op) for op in stage] for s, stage in enumerate(stages)]
    batches = [(torch.ones(m, dtype=torch.float64), torch.ones(m))] * count
    found = method(Job(heard, batches, lambda out, target: out.mean(), SGD(0.01), m=m))
    tell = [{w.item(): v for v, w in enumerate(found.history[s, 0, "w"])} for s in range(len(stages))]
    return {
        (s, t): (tell[s][calls[s][2 * t]], tell[s][calls[s][2 * t + 1]])  # an op runs again for its backward
        for s in range(len(stages))
        for t in range(count * m)
    }


def scale(value: float) -> Op:
    """y = w * x"""
    return Op(lambda carried, w: (w["w"] * carried[0],), {"w": torch.tensor(value, dtype=torch.float64)})


def product(values: list[float], count: int, tied: tuple[int, int] | None = None, rows: int = 1, **more) -> Job:
    """One factor a stage, on data of ones; the loss is the product itself, so nothing but the weights matters."""
    stages = [[scale(value)] for value in values]
    if tied:
        stages[tied[1]] = stages[tied[0]]
    ones = torch.ones(rows, dtype=torch.float64)
    return Job(stages, [(ones, ones)] * count, lambda out, target: out.mean(), **more)


def versions(found: Trained, stage: int) -> list[float]:
    return [w.item() for w in found.history[stage, 0, "w"]]


def test_stashing_by_hand():
    """Two factors a, b from 2, 3 at rate 1/2. Gradients: of a, the b that was used; of b, the a that was used.

    mini-batch   a used   b used   product   a becomes       b becomes
    0            a0 = 2   b0 = 3   6         2 - 3/2 = 1/2   3 - 2/2 = 2
    1            a0 = 2   b1 = 2   4         1/2 - 1 = -1/2  2 - 1 = 1
    2            a1 = 1/2 b2 = 1   1/2       -1/2 - 1/2 = -1 1 - 1/4 = 3/4
    """
    found = stashing(product([2.0, 3.0], 3, rule=SGD(0.5)))
    assert found.losses == [6.0, 4.0, 0.5]
    assert versions(found, 0) == [2.0, 0.5, -0.5, -1.0]
    assert versions(found, 1) == [3.0, 2.0, 1.0, 0.75]


def test_vertical_sync_by_hand():
    """As before, but b follows a: mini-batch 1 uses b0 = 3, mini-batch 2 uses b1 = 2."""
    found = vertical_sync(product([2.0, 3.0], 3, rule=SGD(0.5)))
    assert found.losses == [6.0, 6.0, 1.0]
    assert versions(found, 0) == [2.0, 0.5, -1.0, -2.0]
    assert versions(found, 1) == [3.0, 2.0, 1.0, 0.75]


def test_two_bw_by_hand_and_with_a_forecast():
    """One factor at rate 1/4, loss w squared by using it twice on a stage: the gradient is 2 w of the version used.

    Plain: 1, 1 - 2/4 = 1/2 (from w0), 1/2 - 2/4 = 0 (from w0), 0 - 1/4 (from w1 = 1/2), no change (from w2 = 0).
    Forecast: mini-batch 1 knows no step before w0, so the same; mini-batch 2 uses w1 + (w1 - w0) = 0: no change;
    mini-batch 3 uses w2 + (w2 - w1) = -1/2: 0 + 1/4.
    """
    for predict, wanted in ((None, [1.0, 0.5, 0.0, -0.25, -0.25]), ("xpipe", [1.0, 0.5, 0.0, 0.0, 0.25])):
        job = product([1.0], 4, rule=SGD(0.25), predict=predict)
        job.stages[0].append(job.stages[0][0])
        assert versions(two_bw(job), 0) == wanted


def test_a_shared_factor_by_hand():
    """a on both stages at rate 1/4: version 0, 0, 1 of it on both, gradients 2 a: 1, 1/2, 0, 0 - 1/4."""
    found = stashing(product([1.0, 1.0], 3, tied=(0, 1), rule=SGD(0.25)))
    assert found.history.keys() == {(0, 0, "w")}
    assert versions(found, 0) == [1.0, 0.5, 0.0, -0.25]


@pytest.mark.parametrize("predict", [None, "xpipe"])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("t2", [None, D, 0.3])
def test_no_stashing_and_pipemare_by_scalars(t2, m, predict):
    """a, b, c with warm-ups 2, 1, 0: da = b' c, db = a c, dc = a b, where b' is the corrected newest b."""
    rate, count, rise = 0.1, 7, 4
    a, b, c, drift, losses = [1.1], [0.9], [1.2], 0.0, []
    for k in range(count):
        loss = da = db = dc = 0.0
        for t in range(k * m, k * m + m):
            old_a, old_b = (forecast(w, max(0, (t - warm) // m), k, predict) for w, warm in ((a, 2), (b, 1)))
            back_b = b[k] - drift / m
            loss += old_a * old_b * c[k] / m
            da, db, dc = da + back_b * c[k] / m, db + old_a * c[k] / m, dc + old_a * old_b / m
        losses.append(loss)
        eased = max(2 / m, 1) ** -(1 - min(k / rise, 1)) if t2 else 1
        a, b, c = [*a, a[k] - rate * eased * da], [*b, b[k] - rate * db], [*c, c[k] - rate * dc]
        if t2:
            drift = t2**m * drift + (1 - t2**m) * (b[k + 1] - b[k])
    job = product([1.1, 0.9, 1.2], count, rule=SGD(rate), rows=m, m=m, predict=predict)
    found = pipemare(job, t1=rise, t2=t2) if t2 else no_stash(job)
    assert found.losses == pytest.approx(losses, rel=1e-13)
    for stage, wanted in enumerate((a, b, c)):
        assert versions(found, stage) == pytest.approx(wanted, rel=1e-13)


def forecast(w: list[float], v: int, newest: int, predict: str | None) -> float:
    step = w[v] - w[v - 1] if v else 0.0
    return w[v] + (newest - v) * step if predict else w[v]


def test_pipemare_with_a_shared_factor_by_scalars():
    """a on stages 0 and 1 of 4 (delays 3, 2, 1, 0), then b and c.

    Stage 1 runs the backward of k when its last forward was that of k + 2, which named version k + 2 - 3; with two
    mini-batches left there are no more forwards. Its tau is 2, so its own drift has g = D ** (1/2).
    """
    rate, count, g = 0.1, 8, exp(-2) ** 0.5
    a, b, c, drift_a, drift_b = [1.1], [0.9], [1.2], [0.0], 0.0
    for k in range(count):
        old_a, old_b = a[max(0, k - 3)], b[max(0, k - 1)]
        there = max(0, min(k + 2, count - 1) - 3)
        back_a, back_b = a[there] - 2 * drift_a[there], b[k] - 1 * drift_b
        into_1 = back_b * c[k]
        da = old_a * into_1 + back_a * into_1
        a, b, c = (
            [*a, a[k] - rate * da],
            [*b, b[k] - rate * old_a**2 * c[k]],
            [*c, c[k] - rate * old_a**2 * old_b],
        )
        drift_a.append(g * drift_a[-1] + (1 - g) * (a[k + 1] - a[k]))
        drift_b = D * drift_b + (1 - D) * (b[k + 1] - b[k])
    found = pipemare(product([1.1, 0.0, 0.9, 1.2], count, tied=(0, 1), rule=SGD(rate)))
    for stage, wanted in ((0, a), (2, b), (3, c)):
        assert versions(found, stage) == pytest.approx(wanted, rel=1e-13)


def test_clipping_is_by_stage_or_over_all():
    """Gradients 3 and 4: by stage each comes down to 1, together the norm is 5. Only 2BW can do it together."""
    for method, wanted in ((stashing, (1.0, 1.0)), (two_bw, (0.6, 0.8))):
        found = method(product([4.0, 3.0], 1, rule=SGD(1.0), clip=1.0))
        steps = [versions(found, stage)[0] - versions(found, stage)[1] for stage in (0, 1)]
        assert steps == pytest.approx(wanted, rel=1e-5)


def test_a_stage_that_waits_is_delayed_sgd_on_the_quadratic():
    """Only the first of n stages has a weight, the loss is its square: that is the recursion with delay n - 1."""
    tau, lr, count = 4, 0.3, 40
    job = product([1.0], count, rule=SGD(lr))
    waiting = [*job.stages, *([[]] * tau)]
    for method in (stashing, vertical_sync, no_stash):
        squared = Job(waiting, job.batches, lambda out, target: out.square().mean() / 2, job.rule)
        assert versions(method(squared), 0)[1:] == pytest.approx(quadratic.path(Delays(tau), lr, count), rel=1e-12)


PUBLISHED = {0: 2, 1: 1, 2: 0.618034, 3: 0.445042, 4: 0.347296, 5: 0.284630, 8: 0.184537, 10: 0.149460}
PUBLISHED |= {16: 0.095164, 32: 0.048327, 64: 0.024353}


def test_delayed_sgd_turns_unstable_where_the_theory_says():
    assert {tau: quadratic.threshold(tau) for tau in PUBLISHED} == pytest.approx(PUBLISHED, rel=1e-4)
    for tau in (0, 1, 5, 10, 32):
        assert quadratic.first_unstable(Delays(tau)) == pytest.approx(PUBLISHED[tau], rel=1e-4)


GAPS = [
    (Delays(10, 6, 5), 0.03807),
    (Delays(10, 0, 5), 0.01756),
    (Delays(20, 0, 3), 0.01360),
    (Delays(20, 0, 20), 0.00242),
    (Delays(10, 0, 5, quadratic.best_g(10)), 0.09762),
    (Delays(10, 6, 5, quadratic.best_g(4)), 0.11394),
    (Delays(20, 0, 20, quadratic.best_g(20)), 0.03102),
    (Delays(10, 0, 5, quadratic.default_g(10)), 0.09711),
    (Delays(10, 6, 5, quadratic.default_g(4)), 0.11590),
    (Delays(16, 0, -0.5), 2.0),
    (Delays(16, 0, -0.5, quadratic.best_g(16)), 0.104),
]


@pytest.mark.parametrize(("law", "published"), GAPS)
def test_the_gap_between_forward_and_backward_lowers_the_rate_and_t2_raises_it(law, published):
    assert quadratic.first_unstable(law) == pytest.approx(published, rel=5e-3)


@pytest.mark.parametrize(
    ("law", "edge"), [*((Delays(tau), edge) for tau, edge in PUBLISHED.items()), *((law, edge) for law, edge in GAPS)]
)
def test_the_recursion_itself_turns_there(law, edge):
    steps = 400 * (law.tf + 1)
    assert not quadratic.grows(law, 0.95 * edge, steps)
    assert quadratic.grows(law, 1.05 * edge, steps)


def test_an_unknown_forecast_is_refused():
    with pytest.raises(ValueError, match="'xpipe', not 'spectrain'"):
        product([1.0], 1, rule=SGD(0.1), predict="spectrain")


def test_a_loss_counts_rows_not_micro_batches():
    """Seven rows in three micro-batches (2, 2, 3): the mean over the rows, whatever the cut."""
    model = recursion_models.chain(1)
    batches = model.batches(2, rows=7)
    whole, cut = (synchronous(Job(model.stages, batches, model.loss, SGD(0.1), m=m)) for m in (1, 3))
    assert cut.losses == pytest.approx(whole.losses, abs=1e-13)
    assert close(cut.weights, whole.weights)


@pytest.mark.parametrize("kind", MODELS)
def test_there_is_something_to_learn(kind):
    model = MODELS[kind](2)
    losses = synchronous(Job(model.stages, model.batches(1, rows=6) * 8, model.loss, SGD(0.1))).losses
    assert losses[-1] < losses[0]
