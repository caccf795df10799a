"""`penstock export` and `penstock import` as a person uses them: from a training's checkpoint, and into one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import gpt, listing
from commands import forked, process, refused
from penstock.models.gpt import GPT
from penstock.training.weight_files.export import export_checkpoint

WORKERS = {"ranks": 2}
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SMALL = """
[model]
kind = "gpt"
width = 16
heads = 2
layers = 4
length = 16
vocab = 256
[data]
tokens = "bytes"
[pipeline]
stages = 2
microbatches = 4
[training]
steps = 4
batch = 16
plain_steps = 0
"""
LLAMA = """
[model]
factory = "llama:make_model"
arguments = {vocab = 32, width = 16, inner = 32, layers = 4, heads = 2}
[data]
factory = "llama:make_batches"
arguments = {rows = 8, length = 8, vocab = 32}
[pipeline]
stages = 2
[training]
loss = "llama:next_token"
steps = 2
batch = 8
plain_steps = 0
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def plain_gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(256, 16, 2, 4, 16)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(config: Path, *flags: object) -> list[float]:
    done = forked("train", config, "--json", *flags, **WORKERS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["losses"]


def test_a_training_goes_out_to_plain_torch_and_comes_back(small, tmp_path):
    small.write_text(SMALL + f'checkpoint = "{tmp_path / "kept"}"\n')
    losses(small)
    file = tmp_path / "gpt.safetensors"
    done = process("export", tmp_path / "kept" / "step-4", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"wrote {file}\n")
    model, other = plain_gpt(1), plain_gpt(2)
    model.load_state_dict(load_file(file), strict=True)
    assert not same(model.state_dict(), other.state_dict())
    done = forked("import", small, file, tmp_path / "imported", **WORKERS)
    assert done.returncode == 0, done.stderr
    assert f'train from it with resume = "{tmp_path / "imported"}"' in done.stdout
    assert process("export", tmp_path / "imported", tmp_path / "again.safetensors").returncode == 0
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    fresh = losses(Path(_written(tmp_path / "fresh.toml", SMALL)))
    begun = losses(Path(_written(tmp_path / "begun.toml", SMALL + f'resume = "{tmp_path / "imported"}"\n')))
    assert len(begun) == len(fresh) == 4
    assert begun[0] < fresh[0]  # from what four steps have taught


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_weights_of_plain_torch_are_what_a_training_begins_with(small, tmp_path):
    from safetensors.torch import save_file

    model = plain_gpt(9)
    save_file({n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}, tmp_path / "a.safetensors")
    done = forked("import", small, tmp_path / "a.safetensors", tmp_path / "imported", "--inline")
    assert done.returncode == 0, done.stderr
    export_checkpoint(tmp_path / "imported", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "b.safetensors"), model.state_dict())


def test_a_transformers_model_becomes_a_directory_for_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = tmp_path / "llama.toml"
    config.write_text(LLAMA + f'checkpoint = "{tmp_path / "kept"}"\n')
    (tmp_path / "llama.py").write_text((EXAMPLES / "llama.py").read_text())
    losses(config)
    assert process("export", tmp_path / "kept" / "step-2", tmp_path / "out").returncode == 0
    assert listing(tmp_path / "out") == ["config.json", "generation_config.json", "model.safetensors"]
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert same(found.state_dict(), load_file(tmp_path / "out" / "model.safetensors"))
    done = forked("import", config, tmp_path / "out", tmp_path / "imported", "--inline")
    assert done.returncode == 0, done.stderr
    export_checkpoint(tmp_path / "imported", tmp_path / "again")
    for name in listing(tmp_path / "out"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_what_a_checkpoint_and_its_pipeline_export_is_the_same(tmp_path):
    pipe = gpt(3)
    pipe.save(tmp_path / "a")
    pipe.export(tmp_path / "pipe.safetensors")
    export_checkpoint(tmp_path / "a", tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "pipe.safetensors").read_bytes()


def test_bad_input_gets_one_message(small, tmp_path):
    pipe = gpt(2)
    pipe.save(tmp_path / "a")
    pipe.export(tmp_path / "a.safetensors")
    assert "which exists; nothing is overwritten" in refused("export", tmp_path / "a", tmp_path / "a.safetensors")
    assert "give one such as b.safetensors" in refused("export", tmp_path / "a", tmp_path / "b")
    assert "expected a checkpoint, but got nothing there" in refused(
        "export", tmp_path / "no", tmp_path / "b.safetensors"
    )
    weights, new = tmp_path / "a.safetensors", tmp_path / "new"
    assert "tokens.weight of float32[31, 16], here float32[256, 16]" in refused(
        "import", small, weights, new, "--inline"
    )
    assert "nothing there" in refused("import", small, tmp_path / "no.safetensors", new, "--inline")
    assert "which exists" in refused("import", small, weights, tmp_path / "a", "--inline")
    assert listing(tmp_path) == ["a", "a.safetensors", "small.toml"]


def test_damaged_values_are_not_exported(tmp_path):
    pipe = gpt(2)
    pipe.save(tmp_path / "a")
    data = bytearray((tmp_path / "a" / "__0_0.distcp").read_bytes())
    data[data.index(pipe.model.norm.weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "a" / "__0_0.distcp").write_bytes(bytes(data))
    assert "its checksum differs" in refused("export", tmp_path / "a", tmp_path / "b.safetensors")
    assert listing(tmp_path) == ["a"]
