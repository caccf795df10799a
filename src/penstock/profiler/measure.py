"""A Profile by measuring: every layer forward and backward on this device, as the engine runs stages.

Two runs are interleaved: one stage a layer, and the model cut in two; `settle` says what for. Nothing of the model, its
gradients or the random state is changed, whatever happens meanwhile.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from penstock.core.action import Op
from penstock.core.links import FloatArray
from penstock.core.profile import Layer, PerStage, Profile
from penstock.model.batchnorm import DeferredNorms
from penstock.model.heap import bytes_of
from penstock.model.layers import Layers, layers_of
from penstock.model.pages import keep_pages
from penstock.model.split import Split
from penstock.model.stage import Settings
from penstock.model.untouched import copied, untouched
from penstock.model.walk import watching
from penstock.profiler.bench import Batch, Bench, Kept, Run
from penstock.profiler.sampling import Company, Samples, Show, collect, unseen
from penstock.profiler.settle import Settled, settled
from penstock.profiler.updates import Make, Updates, measure_updates


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure. `make` is the optimizer, from parameters by name; `company`, who measures at the same time."""

    settings: Settings
    make: Make | None = None
    repetitions: int = 10
    threads: int = 1
    company: Company = field(default_factory=Company)
    show: Show = unseen


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile, and what else is to be said of the measurement."""

    profile: Profile
    taken: int  # samples
    quiet: int  # among them
    whole: str | None  # why the model is one layer, where it could not be cut


def measure(model: nn.Module, batch: Batch, wish: MeasureOptions) -> MeasuredProfile:
    """Profile a model for a micro-batch."""
    keep_pages()
    with _threads(wish.threads), torch.enable_grad():
        layers = layers_of(model, batch.args, batch.kwargs)
        halves = _halves(layers, batch)
        seen = layers.split.first.trace
        norms = DeferredNorms(model)
        with untouched(model, seen.generators, seen.written), _gradients_kept(model), norms, watching():
            args, kwargs = copied((batch.args, batch.kwargs))
            own = Batch(args, kwargs, batch.rows, batch.finish, batch.count)
            fine = Bench(layers.split, own, wish.settings, norms)
            coarse = None if halves is None else Bench(halves, own, wish.settings, norms)
            kept = fine.weigh()
            renewed = (coarse or fine).renews()
            found = collect(lambda: _round(fine, coarse, renewed), wish.repetitions, wish.company, wish.show)
            updates = _updates(layers, fine, wish)
    count = len(layers)
    used = found.used
    rows, two = used[:, : 5 * count].reshape(-1, 5, count), used[:, 5 * count : -2].reshape(len(used), 5, -1)
    times = settled(rows, None if halves is None else two, count // 2)
    profile = _profile(layers, batch, kept, times, updates, found, wish)
    why = None if layers.whole is None else str(layers.whole)
    return MeasuredProfile(profile, len(found.quiet), int(found.quiet.sum()), why)


def _halves(layers: Layers, batch: Batch) -> Split | None:
    """The model cut in two, at its middle layer."""
    if len(layers) < 3:
        return None
    return Split(layers.split.model, 2, batch.args, batch.kwargs, layers.cuts((len(layers) // 2,)))


def _round(fine: Bench, coarse: Bench | None, renewed: bool) -> FloatArray:
    """Five rows of seconds by layer; five of the two stages, each run as a rank runs it; how uneven micro-batches were;
    and how much longer all takes with renewed weights."""
    rows, whole = _five(fine, alone=False)
    if coarse is not None:
        two, whole = _five(coarse, alone=True)
        rows += two
    new = (coarse or fine).run(apart=False, newest=True, alone=coarse is not None) if renewed else whole
    return np.concatenate([*rows, [whole.unevenness, _total(new) / _total(whole) - 1.0]])


def _five(bench: Bench, alone: bool) -> tuple[list[FloatArray], Run]:
    """Seconds of the five operations on each stage; the run with both gradients together."""
    whole, apart = bench.run(apart=False, alone=alone), bench.run(apart=True, alone=alone)
    rows = [whole.seconds[op] for op in (Op.F, Op.B)] + [apart.seconds[op] for op in (Op.F, Op.I, Op.W)]
    return rows, whole


def _total(run: Run) -> float:
    return float(run.seconds[Op.F].sum() + run.seconds[Op.B].sum())


def _updates(layers: Layers, bench: Bench, wish: MeasureOptions) -> Updates:
    if wish.make is None:
        return Updates(np.zeros(len(layers)), [0] * len(layers), 0.0)
    named = dict(layers.split.model.named_parameters())
    owned = [{name: named[name] for name in layer.parameters} for layer in layers]
    return measure_updates(owned, wish.make, bench.gradient, wish.settings.device)


def _profile(
    layers: Layers,
    batch: Batch,
    kept: list[Kept],
    times: Settled,
    updates: Updates,
    found: Samples,
    wish: MeasureOptions,
) -> Profile:
    model, sent = layers.split.model, layers.sent
    parts = []
    for at, layer in enumerate(layers):
        parts.append(
            Layer(
                layer.name,
                float(times.forward[at]),
                float(times.input_grad[at]),
                float(times.weight_grad[at]),
                output_bytes=sum(one.bytes for one in sent if one.source == at),
                kept_bytes=kept[at].activations,
                kept_until_weight_bytes=kept[at].until_weight,
                parameter_bytes=bytes_of(model.get_parameter(name) for name in layer.parameters),
                buffer_bytes=bytes_of(model.get_buffer(name) for name in layer.buffers),
                optimizer_bytes=updates.bytes[at],
                update=float(updates.seconds[at]),
                full_backward=float(times.backward[at]),
                spread=float(times.spread[at]),
            )
        )
    own = PerStage(times.per_stage.forward, times.per_stage.backward, updates.own)
    uneven, newer = found.used[times.usual, -2:].T
    return Profile(
        tuple(parts), tuple(layers.edges), batch.rows, device_name(wish.settings.device), sent, own,
        repetitions=len(found.used), disturbed=found.disturbed, newest=max(0.0, float(newer.mean())),
        jitter=float(np.sqrt(uneven.mean())),
    )  # fmt: skip


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if device.type == "cpu" and known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or device.type
