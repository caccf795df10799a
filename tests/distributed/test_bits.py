"""Workers give the inline engine's bits: every synchronous schedule, 2 to 4 ranks, over shared memory and over gloo."""

from __future__ import annotations

import functools
import json

import bits
import pytest
import torch

from ranks import launched

torch.set_num_threads(1)


@functools.cache
def inline(kind: str, name: str, ranks: int) -> dict:
    return bits.run(kind, name, ranks)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_and_model_gives_the_inline_bits(ranks, transport, tmp_path):
    file = tmp_path / "found.json"
    with launched(tmp_path, ranks, transport, str(file), script=bits.__file__) as run:
        assert run.wait(600) == 0, run.said
    found = json.loads(file.read_text())
    assert len(found) == len(bits.KINDS) * len(bits.SCHEDULES)
    wrong = [case for case, made in found.items() if made != inline(*case.split(" ", 1), ranks)]
    assert wrong == []
