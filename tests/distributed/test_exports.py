"""Weights that workers export and import: each rank its own tensors of one file, and none the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from export_rank import LAYERS, WIDTH
from safetensors.torch import load_file

from checkpoints import LENGTH, VOCAB, batch, gpt, listing
from penstock.models.gpt import GPT
from penstock.training.weight_files.safetensors import FileLayout, Form
from ranks import all_gone, launched

torch.set_num_threads(1)
SCRIPT = str(Path(__file__).parent / "export_rank.py")
MIB = 1 << 20


def workers(folder: Path, size: int, *actions: str, stages: int | None = None, **options: object) -> list[dict]:
    """What the ranks have said."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(folder), str(stages or size), json.dumps(options), *actions]
    with launched(folder, size, *words, script=SCRIPT) as run:
        assert run.wait() == 0, run.said
        assert "Warning" not in run.said
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(size)]


def whole(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt", weights_only=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (4, {}),
        (2, {"schedule": "interleaved", "chunks": 2}),
        (2, {"schedule": "2bw"}),
        (4, {"schedule": "pipemare"}),
        (2, {"offload": "weights"}),
    ],
    ids=str,
)
def test_what_workers_export_is_taken_strictly_and_imported_by_others(size, options, tmp_path):
    path, out = tmp_path / "gpt.safetensors", tmp_path / "out"
    workers(out, size, "train:3", f"export:{path}", "state:then", "train:1", f"import:{path}", "state:back", **options)
    model = GPT(VOCAB, 16, 2, 4, LENGTH)
    model.load_state_dict(load_file(path), strict=True)
    assert same(model.state_dict(), whole(out, "then"))
    assert same(whole(out, "back"), whole(out, "then"))
    alone = gpt(3)
    alone.import_weights(path)
    assert same(alone.state_dict(), whole(out, "then"))


def test_one_process_exports_the_bytes_that_workers_do(tmp_path):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    gpt(2).export(one)
    workers(tmp_path / "out", 2, f"export:{two}")
    assert one.read_bytes() == two.read_bytes()


def test_no_ranks_memory_grows_with_the_whole_model(tmp_path):
    """Each of four ranks has a quarter. An export holds a tensor more at a time; an import what it reads, once in the
    pages of the file and once as its own."""
    path = tmp_path / "big.safetensors"
    said = workers(tmp_path / "out", 4, f"peak:export,{path}", f"peak:import,{path}", big=True)
    tensor = 4 * WIDTH * WIDTH
    stage, model = LAYERS * tensor, 4 * LAYERS * tensor
    assert path.stat().st_size > model
    spare = 12 * MIB
    for rank in said:
        exporting, importing = rank["peaks"]
        assert exporting < tensor + spare
        assert importing < 2 * stage + spare < model


def test_a_weightless_model_is_filled_from_a_file(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    workers(tmp_path / "2", 2, f"export:{first}", big=True)
    workers(tmp_path / "3", 2, f"export:{second}", big=True, load=str(first), seed=7)
    assert first.read_bytes() == second.read_bytes()
    assert len({tensor.sum().item() for tensor in load_file(first).values()}) == 2 * LAYERS  # no two are alike


@pytest.mark.parametrize("where", ["1,pwrite,3", "0,pwrite,3", "0,rename,1"])
def test_a_killed_export_leaves_no_file_under_the_name(where, tmp_path):
    path, out = tmp_path / "a.safetensors", tmp_path / "out"
    out.mkdir()
    words = [str(out), "2", "{}", f"die:{where}", f"export:{path}"]
    with launched(out, 2, *words, script=SCRIPT) as run:
        pids = run.begun(2)
        assert run.wait() != 0
        all_gone(list(pids.values()), 5.0)
    assert not path.exists()
    gpt(2).export(path)  # which clears up what the others have left
    assert listing(tmp_path) == ["a.safetensors", "out"]


def test_all_ranks_refuse_alike_and_training_goes_on(tmp_path):
    bad, tmp = tmp_path / "bad.safetensors", tmp_path / "dir"
    bad.write_bytes(b"no weights")
    tmp.mkdir()
    path, there = tmp / "a.safetensors", tmp / "b.safetensors"
    actions = ["train:1", "limit:5000", f"try:{path}", "unlimit:", f"refuse:{bad}", f"export:{there}", f"try:{there}"]
    said = workers(tmp_path / "out", 2, *actions, "train:1")
    assert said[0]["errors"] == said[1]["errors"]
    full, damaged, exists = said[0]["errors"]
    assert "on rank 1 OSError: [Errno 27] File too large" in full
    assert "bad.safetensors: expected a safetensors file" in damaged
    assert "which exists; nothing is overwritten" in exists
    assert listing(tmp) == ["b.safetensors"]
    pipe = gpt(2)
    assert said[0]["losses"] == [pipe.step(*given).loss for given in map(batch, range(2))]


def test_hosts_without_a_directory_in_common_are_told(tmp_path):
    """A rank that does not see the file that rank 0 has made says so, as one of another host would."""
    layout = FileLayout({"a": Form("float32", (2,))})
    with pytest.raises(OSError, match=r"no such file on this host, and all hosts have to share it"):
        layout.write(tmp_path / "elsewhere" / "model.safetensors", [("a", torch.ones(2))])
