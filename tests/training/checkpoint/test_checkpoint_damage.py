"""Checkpoints that are damaged although their checksums are right: refused in one message, and nothing is taken."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from checkpoints import VOCAB, batch, conv, gpt, pictures
from json_mutations import damages
from penstock import InputError, Pipeline

torch.set_num_threads(1)
COUNT = 100  # damages of each kind of training; there are some thousand
pytestmark = pytest.mark.cpu_only  # the helpers make their batches in host memory


def several(optimizer):
    parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.CosineAnnealingLR(optimizer, 9)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


# one of every kind of fact: groups, schedulers, scale, an unfinished accumulation, drift, steps of weights
CASES: dict[str, Any] = {
    "AdamW by groups": lambda: gpt(2),
    "fp16, in an accumulation": lambda: gpt(2, precision="fp16", accumulate=2, lr_scheduler=several),
    "Adafactor, plateau": lambda: gpt(
        2,
        optimizer=lambda params: torch.optim.Adafactor(params),
        lr_scheduler=lambda optimizer: schedulers.ReduceLROnPlateau(optimizer),
    ),
    "pipemare": lambda: gpt(2, schedule="pipemare", clip=None, t1=4, t3=2),
    "momentum and batch norms": lambda: conv(2),
}


def frozen(value: Any) -> Any:
    """A value that can be compared to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return [(repr(key), frozen(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [frozen(part) for part in value]
    return type(value).__name__, repr(value)


def everything(pipe: Pipeline) -> Any:
    """All that a checkpoint could change."""
    parts = pipe.optimizers
    held = [] if pipe.async_trainer is None else list(pipe.async_trainer.weights.every())
    return frozen(
        {
            "model": pipe.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers.values()],
            "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers],
            "training": [
                pipe.index,
                parts.scale,
                parts.good if parts.fp16 else 0,
                parts.weight,
                parts.steps,
                parts.unit,
            ],
            "sums": {parts.names[parameter]: total for parameter, total in parts.sums.items()},
            "since": None if pipe.async_trainer is None else pipe.async_trainer.updates.since,
            "drift": [one.drift.delta for one in held if one.drift is not None],
            "steps": [(one.steps.newest, one.steps.by_version) for one in held if one.steps is not None],
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        }
    )


def write_facts(path: Path, facts: Any) -> None:
    """As a stranger might, with the right checksum."""
    told = {"checksum": zlib.crc32(json.dumps(facts).encode()), "facts": facts}
    (path / "penstock.json").write_text(json.dumps(told))


@pytest.mark.parametrize("case", CASES)
def test_damaged_facts_with_the_right_checksum_change_nothing(case, tmp_path):
    """Either refused, with the pipeline as it was, or values that a training could have had: it then goes on."""
    pipe, given = CASES[case](), pictures if "batch norms" in case else batch
    for _ in range(3):
        pipe.step(*given(pipe.index))
    pipe.save(tmp_path / "a")
    facts = json.loads((tmp_path / "a" / "penstock.json").read_text())["facts"]
    every = [one for one in damages(facts) if not one[0].startswith(("random/", "tensors/model"))]
    every += random.Random(case).sample(list(damages(facts)), COUNT)
    pipe.load(tmp_path / "a")
    taken, before = [], everything(pipe)
    for what, damaged in random.Random(case).sample(every, COUNT):
        write_facts(tmp_path / "a", damaged())
        try:
            pipe.load(tmp_path / "a")
        except InputError as error:
            assert str(tmp_path / "a") in str(error), what  # noqa: PT017
            assert everything(pipe) == before, what
        else:
            pipe.step(*given(0))
            taken.append(what)
            write_facts(tmp_path / "a", facts)
            pipe.load(tmp_path / "a")
            assert everything(pipe) == before, what
    assert len(taken) < COUNT / 4, taken


class Refusing(torch.optim.SGD):
    """An optimizer that finds only late, and on the second stage alone, that it cannot go on."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if all(parameter.dim() == 1 or parameter.shape[0] != VOCAB for parameter in self.param_groups[0]["params"]):
            raise KeyError("something of its own")


def test_what_an_optimizer_refuses_leaves_all_of_them_as_they_were(tmp_path):
    def make():
        return gpt(2, optimizer=lambda params: Refusing(params, lr=0.1, momentum=0.9), clip=None)

    pipe = make()
    for number in range(2):
        pipe.step(*batch(number))
    pipe.save(tmp_path / "a")
    pipe.step(*batch(2))
    before, twin = everything(pipe), make()
    with pytest.raises(InputError, match="something of its own"):
        pipe.load(tmp_path / "a")
    assert everything(pipe) == before
    for number in range(3):
        twin.step(*batch(number))
    assert pipe.step(*batch(3)).loss == twin.step(*batch(3)).loss
