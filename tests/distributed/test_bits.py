"""Workers give the inline engine's bits: every synchronous schedule, 2 to 4 ranks, over shared memory and over gloo."""

from __future__ import annotations

import json

import bits
import pytest
import torch

from ranks import launched

torch.set_num_threads(1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", bits.KINDS)
def test_every_schedule_gives_the_inline_bits_over_every_transport(kind, ranks, tmp_path):
    file = tmp_path / "found.json"
    modules = ("transformers.models.llama.modeling_llama",) if kind == "llama" else ()
    with launched(tmp_path, ranks, kind, str(file), script=bits.__file__, modules=modules) as run:
        assert run.wait(600) == 0, run.said
    found, wanted = json.loads(file.read_text()), bits.run(kind, ranks)
    assert len(wanted) == sum(map(len, bits.SCHEDULES)) == 12
    for transport in bits.TRANSPORTS:
        assert [name for name in wanted if found[transport][name] != wanted[name]] == []
