"""Forwards that go another way in each process or on each batch: ranks train what plain training does, or refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import unlike

from ranks import launched

torch.set_num_threads(1)

OTHER = {  # in each process: nothing that ranks can share
    "other numbers": "the same forward on every rank",
    "other layers": "the same forward on every rank",
    "blocks through a set": "the same forward on every rank",
    "layers through a set": "expected the same layer 'kinds.",
}
HASHED = (
    "through a set", "one module through a set", "glue through a set", "registered through a set", "sorted by hash",
    "sorted by address", "result through a set", "batches through a set",
)  # fmt: skip
PARTED = "a weight used elsewhere"  # of a stage that has not got it
ALIKE = tuple(name for name in unlike.CASES if name not in OTHER)
SEEDS = {2: ["1,8", "2,7", "3,13", "4,14"], 4: ["1,7,2,8", "3,13,4,14"]}  # all three of OTHER differ
CLOSE = 1e-13
IN_SINGLES = ("gemma3", "llama", "llama without cache")  # their norms are in float32, so a last bit becomes 1e-7


def on_ranks(folder: Path, ranks: int, names: tuple[str, ...], **more) -> list[dict]:
    modules = (
        () if "fork" in more else tuple(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "bert"))
    )
    words = (";".join(names), str(folder / "found"))
    with launched(folder, ranks, *words, script=unlike.__file__, modules=modules, **more) as run:
        assert run.wait(300) == 0, run.said
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


def wrong(found: list[dict]) -> dict:
    return {name: off for one in found for name, off in one.items() if not isinstance(off, float) or off > close(name)}


def close(name: str) -> float:
    return 1e-5 if name in IN_SINGLES else CLOSE


@pytest.fixture
def in_doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ALIKE)
def test_in_one_process(name, stages, in_doubles):
    found = unlike.outcome(name, stages)
    assert isinstance(found, float), found
    assert found <= close(name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(ranks, tmp_path):
    found = on_ranks(tmp_path, ranks, ALIKE)
    for refusal in [one.pop(PARTED) for one in found]:
        assert "'first.bias', which stage" in refusal
    assert wrong(found) == {}


@pytest.mark.parametrize(("ranks", "seeds"), [(ranks, seeds) for ranks, some in SEEDS.items() for seeds in some])
def test_with_other_hashes_on_every_rank(ranks, seeds, tmp_path):
    """Sets of strings are gone through in another order in each process. Where that leads to another computation, all
    ranks say so, and name it."""
    more = ("gemma3",) if seeds == SEEDS[ranks][0] else ()
    found = on_ranks(tmp_path, ranks, (*HASHED, *more, *OTHER), fork=False, HASHES=seeds)
    for name, words in OTHER.items():
        refusals = [one.pop(name) for one in found]
        assert all(words in str(said) for said in refusals), refusals
    assert wrong(found) == {}
