"""Run as a program: one step of a pipeline with big activations, its high-water mark beside what the model says.

    python footprint.py gpipe never        prints predicted and measured bytes

A process of its own, because a high-water mark never falls. A is taken from one layer alone, before there is a
pipeline.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from freed import give_back_what_is_freed
from penstock import Pipeline, Schedule
from penstock.core.action import Op
from penstock.core.cost import Footprint, flat_costs
from penstock.core.lowered_loop import ActionRow
from penstock.core.memory import activation_changes
from penstock.engine.observer import Observer

WIDTH, ROWS = 16, 65536  # one activation of a micro-batch: 4 MiB
SIZES = {"never": (4, 4, 7), "always": (2, 2, 64)}  # stages, micro-batches, layers a stage: over 500 MiB at the peak


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """What autograd keeps of one layer, without its parameters: its input is counted, its output is the next one's."""
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.requires_grad_())
    return sum(seen.values())


class Order(Observer):
    """The compute rows of a run, in the order in which the engine runs them."""

    def __init__(self) -> None:
        self.rows: list[ActionRow] = []

    def before(self, row: ActionRow) -> None:
        if row.op <= Op.FB:
            self.rows.append(row)


def predicted(schedule: Schedule, order: list[ActionRow], layer: int, one: int, layers: int, again: bool) -> float:
    """The highest sum over all ranks of what the memory model says, in the order in which the engine runs."""
    costs = flat_costs(schedule.shape, recompute=again)
    full = np.full(schedule.shape.stages, float(layer * layers))
    inputs = np.full(schedule.shape.stages, float(one))
    foot = costs.footprint
    object.__setattr__(costs, "footprint", Footprint(full, full, inputs, foot.weights, foot.gradients, foot.optimizer))
    rows = schedule.rows
    changes = activation_changes(schedule, costs).values()
    at = {
        (int(o), int(s), int(k)): i
        for i, (o, s, k) in enumerate(zip(rows.op, rows.stage, rows.microbatch, strict=True))
    }
    level = highest = 0.0
    for ran in order:
        row = at[ran.op, ran.stage, ran.microbatch]
        level += sum(begin[row] for begin, _ in changes)
        highest = max(highest, level)
        level += sum(end[row] for _, end in changes)
    return highest


def resident(which: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def main(method: str, recompute: str) -> None:
    give_back_what_is_freed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages, parts, layers = SIZES[recompute]
    x = torch.randn(ROWS * parts, WIDTH)
    layer = kept_bytes(Layer(), torch.randn(ROWS, WIDTH))
    model = nn.Sequential(*(nn.Sequential(*(Layer() for _ in range(layers))) for _ in range(stages)))
    pipe = Pipeline(
        model,
        example=x[:4].clone(),
        cuts=[str(stage) for stage in range(1, stages)],
        schedule=method,
        microbatches=parts,
        loss=lambda out, _: (out.square().sum(), float(len(out))),
        recompute=recompute,
    )
    order = Order()
    pipe.observers.add(order)
    pipe.step(x[: 4 * parts])  # what the first step alone needs, and what libraries allocate once
    pipe.observers.discard(order)
    before = resident("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts from here
    pipe.step(x)
    measured = resident("VmHWM") - before
    print(int(predicted(pipe.schedule, order.rows, layer, ROWS * WIDTH * 4, layers, recompute == "always")), measured)


if __name__ == "__main__":
    main(*sys.argv[1:])
