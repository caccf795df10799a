"""Plans that workers and the inline engine must carry out to the same bits, and what one run of them gives.

Run as a script, by every rank: python plan_bits.py FOLDER CASE..., which holds the plans and gets what each rank found.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
from penstock import StagePlan
from penstock.core.match import match
from penstock.core.timeline import Timeline
from penstock.model.layers import layers_of
from penstock.models.gpt import GPT

torch.set_num_threads(1)
CASES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {  # schedule, ranks of the stages, cuts
    "uneven": ("1f1b", (0, 1), (3,)),
    "interleaved": ("interleaved", (0, 1, 0, 1), (1, 5, 9)),
    "zb-v": ("zb-v", (0, 1, 1, 0), (2, 3, 8)),
    "pipedream": ("pipedream", (0, 1), (7,)),
    "2bw": ("2bw", (0, 1), (4,)),
}


Devices = tuple[tuple[tuple[int, ...], ...], ...]
# On three devices, in another order than their slots; of "few" the plan leaves some of the cluster's devices out.
MOVED: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], Devices]] = {
    "moved": ("1f1b", (0, 1, 2), (3, 7), (((2,),), ((0,),), ((1,),))),
    "moved pipedream": ("pipedream", (0, 1, 2), (3, 7), (((1,),), ((2,),), ((0,),))),
    "replicas": ("1f1b", (0, 1), (5,), (((2,), (0,)), ((1,),))),
    "few": ("zb-h1", (0, 1), (5,), (((9,),), ((3,), (7,)))),
    "chunks": ("interleaved", (0, 1, 0, 1), (1, 5, 9), (((0,), (2,)), ((1,),))),
}


def plan(case: str) -> penstock.Plan:
    """Every second stage recomputes, every third offloads."""
    schedule, placement, cuts, *moved = CASES[case] if case in CASES else MOVED[case]
    devices = moved[0] if moved else (((0,),), ((1,),))
    layers = len(layers_of(model(), (torch.zeros(2, 8, dtype=torch.long),), {}))
    ends = pairwise([0, *cuts, layers])
    stages = tuple(StagePlan(a, b - 1, at % 2 == 1, at % 3 == 0) for at, (a, b) in enumerate(ends))
    return penstock.Plan(stages, placement, devices, schedule, 4)


def model() -> GPT:
    torch.manual_seed(7)
    return GPT(vocab=32, width=16, heads=2, layers=8, length=8, dropout=0.1)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def run(given: Any) -> dict[str, Any]:
    """Five mini-batches: the losses, and a fingerprint of everything that was trained."""
    mine = model()
    data = [(torch.randint(0, 32, (8, 8)), torch.randint(0, 32, (8, 8))) for _ in range(5)]
    pipe = penstock.Pipeline(
        mine, example=data[0][0][:2], plan=given, loss=loss, verify=False, timeout=60,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )  # fmt: skip
    losses = [step.loss for step in pipe.train(data)]
    state = pipe.state_dict()
    forwards = {f"{stage.index}.{stage.replica}": stage.forwards for stage in pipe.stages}
    line = pipe.timeline()
    pipe.close()
    mark = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
    return {"losses": losses, "mark": mark, "forwards": forwards, "in order": sends_come_first(line)}


def sends_come_first(line: Timeline) -> bool:
    """Whether the timeline has every slot's times at its own rows."""
    pairs = match(line.schedule)
    used = pairs.sends >= 0
    return bool((line.end[pairs.receives[used]] > line.start[pairs.sends[used]]).all())


def main(folder: str, *cases: str) -> None:
    rank = os.environ["RANK"]
    found = {case: run(Path(folder) / f"{case}.json") for case in cases}
    Path(folder, f"found.{rank}").write_text(json.dumps(found))


def disagree() -> None:
    """Rank 1 has been given another plan of the same schedule."""
    mine = plan("uneven")
    run(
        mine if os.environ["RANK"] == "0" else replace(mine, stages=(StagePlan(0, 3), replace(mine.stages[1], first=4)))
    )


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else disagree()
