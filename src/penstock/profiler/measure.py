"""Measure a profile: run every layer forward and backward on this device, as the engine runs stages.

Two splits are measured alternately, one with a stage for each layer and one with two stages; see `layer_seconds`. The
model, its gradients and the random state are left unchanged, even after an error.
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
from penstock.profiler.bench import Batch, Bench, BenchRun, KeptBytes
from penstock.profiler.layer_seconds import LayerSeconds, layer_seconds
from penstock.profiler.sampling import Peers, Samples, Show, collect, no_progress
from penstock.profiler.updates import Make, UpdateCosts, measure_updates


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure. `make` builds the optimizer from parameters by name; `peers` are processes that measure at the
    same time."""

    settings: Settings
    make: Make | None = None
    repetitions: int = 10
    threads: int = 1
    peers: Peers = field(default_factory=Peers)
    show: Show = no_progress


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile, and facts about its measurement."""

    profile: Profile
    taken: int  # samples
    quiet: int  # undisturbed samples among them
    whole: str | None  # why the model is one layer, where it could not be cut


def measure(model: nn.Module, batch: Batch, options: MeasureOptions) -> MeasuredProfile:
    """Measure the profile of a model for a micro-batch."""
    keep_pages()
    with _threads(options.threads), torch.enable_grad():
        layers = layers_of(model, batch.args, batch.kwargs)
        halves = _halves(layers, batch)
        trace = layers.split.first.trace
        norms = DeferredNorms(model)
        with untouched(model, trace.generators, trace.written), _gradients_kept(model), norms, watching():
            args, kwargs = copied((batch.args, batch.kwargs))
            own = Batch(args, kwargs, batch.rows, batch.finish, batch.count)
            fine = Bench(layers.split, own, options.settings, norms)
            coarse = None if halves is None else Bench(halves, own, options.settings, norms)
            kept = fine.kept_bytes()
            renewed = (coarse or fine).can_renew_weights()
            samples = collect(lambda: _round(fine, coarse, renewed), options.repetitions, options.peers, options.show)
            updates = _updates(layers, fine, options)
    count = len(layers)
    used = samples.used
    rows, two = used[:, : 5 * count].reshape(-1, 5, count), used[:, 5 * count : -2].reshape(len(used), 5, -1)
    times = layer_seconds(rows, None if halves is None else two, count // 2)
    profile = _profile(layers, batch, kept, times, updates, samples, options)
    why = None if layers.whole is None else str(layers.whole)
    return MeasuredProfile(profile, len(samples.quiet), int(samples.quiet.sum()), why)


def _halves(layers: Layers, batch: Batch) -> Split | None:
    """Return the model cut in two at its middle layer; None with fewer than three layers."""
    if len(layers) < 3:
        return None
    return Split(layers.split.model, 2, batch.args, batch.kwargs, layers.cuts((len(layers) // 2,)))


def _round(fine: Bench, coarse: Bench | None, renewed: bool) -> FloatArray:
    """Return five rows of seconds by layer; five of the two stages, each run as a rank runs it; the unevenness of
    micro-batches; and by which share renewed weights take longer."""
    rows, whole = _operation_seconds(fine, alone=False)
    if coarse is not None:
        two, whole = _operation_seconds(coarse, alone=True)
        rows += two
    new = (coarse or fine).run(apart=False, renewed=True, alone=coarse is not None) if renewed else whole
    return np.concatenate([*rows, [whole.unevenness, _total(new) / _total(whole) - 1.0]])


def _operation_seconds(bench: Bench, alone: bool) -> tuple[list[FloatArray], BenchRun]:
    """Return the seconds of the five operations on each stage, and the run with both gradients together."""
    whole, apart = bench.run(apart=False, alone=alone), bench.run(apart=True, alone=alone)
    rows = [whole.seconds[op] for op in (Op.F, Op.B)] + [apart.seconds[op] for op in (Op.F, Op.I, Op.W)]
    return rows, whole


def _total(run: BenchRun) -> float:
    return float(run.seconds[Op.F].sum() + run.seconds[Op.B].sum())


def _updates(layers: Layers, bench: Bench, options: MeasureOptions) -> UpdateCosts:
    if options.make is None:
        return UpdateCosts(np.zeros(len(layers)), [0] * len(layers), 0.0)
    named = dict(layers.split.model.named_parameters())
    owned = [{name: named[name] for name in layer.parameters} for layer in layers]
    return measure_updates(owned, options.make, bench.gradient, options.settings.device)


def _profile(
    layers: Layers,
    batch: Batch,
    kept: list[KeptBytes],
    times: LayerSeconds,
    updates: UpdateCosts,
    samples: Samples,
    options: MeasureOptions,
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
    uneven, renewed = samples.used[times.middle_half, -2:].T
    return Profile(
        tuple(parts), tuple(layers.edges), batch.rows, device_name(options.settings.device), sent, own,
        repetitions=len(samples.used), disturbed=samples.disturbed, newest=max(0.0, float(renewed.mean())),
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
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if device.type == "cpu" and cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or device.type
