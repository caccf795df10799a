"""Weights as safetensors files: written by any stages, taken strictly by plain torch and by transformers, and back."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints import LENGTH, VOCAB, batch, conv, differences, gpt, listing, pictures, state, steps
from penstock import InputError, Pipeline
from penstock.models.gpt import GPT
from plain import conv_net

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu_only  # the helpers make their batches in host memory


def plain_gpt() -> nn.Module:
    torch.manual_seed(77)
    return GPT(VOCAB, 16, 2, 4, LENGTH)


class Types(nn.Module):
    """Buffers and parameters of every type and form that a file can hold, and one buffer that no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        source = torch.Generator().manual_seed(3)
        for kind in ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"):
            self.register_buffer(f"of_{kind}", torch.randn(3, 5, generator=source).to(getattr(torch, kind)))
        for kind in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"):
            self.register_buffer(f"of_{kind}", torch.randint(0, 2, (7,), generator=source).to(getattr(torch, kind)))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("turned", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("strided", torch.arange(12.0)[::3])
        self.register_buffer("secret", torch.ones(2), persistent=False)
        self.register_buffer('name with " signs ü', torch.ones(1))

    def forward(self, x):
        return self.second(self.first(x).tanh())


def types(stages: int) -> Pipeline:
    return Pipeline(Types(), example=torch.rand(2, 4), stages=stages, loss=nn.functional.mse_loss)


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def bits(tensor):
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


class TestOneFile:
    @pytest.mark.parametrize("stages", [1, 2, 3])
    def test_of_a_tied_model_is_taken_strictly(self, stages, tmp_path):
        pipe, path = gpt(stages), tmp_path / "new" / "gpt.safetensors"
        steps(pipe, 2)
        pipe.export(path)
        model = plain_gpt()
        model.load_state_dict(load_file(path), strict=True)
        assert same_bits(model.state_dict(), pipe.state_dict())
        assert model.head.weight is model.tokens.weight
        assert listing(path.parent) == ["gpt.safetensors"]

    def test_has_batch_norms(self, tmp_path):
        pipe, model = conv(2), conv_net()
        steps(pipe, 2, pictures)
        pipe.export(tmp_path / "a.safetensors")
        model.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
        assert any(name.endswith("num_batches_tracked") for name in model.state_dict())
        assert same_bits(model.state_dict(), pipe.state_dict())

    def test_has_every_type_and_form(self, tmp_path):
        pipe = types(2)
        pipe.export(tmp_path / "a.safetensors")
        found = load_file(tmp_path / "a.safetensors")
        assert same_bits(found, pipe.model.state_dict())
        assert "secret" not in found
        back = types(1)
        for buffer in back.model.buffers():
            buffer.zero_()
        back.import_weights(tmp_path / "a.safetensors")
        assert same_bits(back.model.state_dict(), pipe.model.state_dict())
        with safe_open(tmp_path / "a.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    @pytest.mark.parametrize("schedule", ["pipedream", "2bw", "pipemare"])
    def test_without_a_flush_has_the_newest_weights(self, schedule, tmp_path):
        pipe = gpt(2, schedule=schedule, accumulate=1, clip=None, microbatches=1 if schedule == "pipedream" else 4)
        for step in pipe.train(batch(number) for number in range(5)):
            if step.index == 2:
                pipe.export(tmp_path / "a.safetensors")
                newest = {name: value.clone() for name, value in pipe.state_dict().items()}
        assert same_bits(load_file(tmp_path / "a.safetensors"), newest)
        assert not same_bits(pipe.state_dict(), newest)

    def test_has_weights_that_wait_in_host_memory(self, tmp_path):
        pipe = gpt(2, offload="weights")
        steps(pipe, 1)
        pipe.export(tmp_path / "a.safetensors")
        assert same_bits(load_file(tmp_path / "a.safetensors"), pipe.state_dict())

    def test_changes_nothing(self, tmp_path):
        pipe, other = gpt(2), gpt(2)
        steps(pipe, 1), steps(other, 1)
        pipe.export(tmp_path / "a.safetensors")
        assert steps(pipe, 2) == steps(other, 2)
        assert not differences(state(pipe), state(other))


class TestTransformers:
    @pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
    def test_a_directory_is_taken_by_from_pretrained(self, name, tmp_path, recwarn):
        pipe = hugging(name, 2)
        hugging_step(pipe)
        pipe.export(tmp_path / "out")
        found, info = type(pipe.model).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert {key: list(value) for key, value in info.items()} == {key: [] for key in info}
        assert same_bits(found.state_dict(), pipe.state_dict())
        assert found.config.architectures == [type(pipe.model).__name__]
        again = hugging(name, 3, seed=2)  # the same file, strictly
        again.model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
        other = hugging(name, 3, seed=3)
        other.import_weights(tmp_path / "out")
        assert same_bits(other.state_dict(), pipe.state_dict())
        assert not list(recwarn)

    @pytest.mark.parametrize("shards", ["5GB", "20KB"])
    @pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
    def test_what_save_pretrained_writes_is_taken(self, name, shards, tmp_path):
        model = hugging(name, 1, seed=5).model
        model.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
        assert (shards == "20KB") == (tmp_path / "theirs" / "model.safetensors.index.json").exists()
        pipe = hugging(name, 2)
        pipe.import_weights(tmp_path / "theirs")
        assert same_bits(pipe.state_dict(), model.state_dict())

    def test_the_users_config_stays_as_it_is(self, tmp_path):
        pipe = hugging("gpt2", 2)
        before = pipe.model.config.to_dict()
        pipe.export(tmp_path / "out")
        assert pipe.model.config.to_dict() == before

    def test_one_file_of_such_a_model(self, tmp_path):
        pipe = hugging("gpt2", 2)
        pipe.export(tmp_path / "gpt2.safetensors")
        assert same_bits(load_file(tmp_path / "gpt2.safetensors"), pipe.state_dict())
        assert listing(tmp_path) == ["gpt2.safetensors"]


def hugging(name: str, stages: int, seed: int = 1) -> Pipeline:
    """A small model of transformers whose head is its embedding."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 31, "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 32}
    config, kind = {
        "gpt2": (
            transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=31, n_positions=8, use_cache=False),
            transformers.GPT2LMHeadModel,
        ),
        "llama": (
            transformers.LlamaConfig(**small, num_attention_heads=2, tie_word_embeddings=True, use_cache=False),
            transformers.LlamaForCausalLM,
        ),
        "bert": (transformers.BertConfig(**small, num_attention_heads=2), transformers.BertForMaskedLM),
    }[name]
    torch.manual_seed(seed)
    return Pipeline(
        kind(config).train(False),
        example={"input_ids": torch.zeros(2, 8, dtype=torch.long)},
        stages=stages,
        microbatches=2,
        loss=lambda result, target: nn.functional.cross_entropy(result.logits.flatten(0, 1), target.flatten()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        verify=False,
    )


def hugging_step(pipe: Pipeline) -> None:
    inputs, target = batch(0)
    pipe.step({"input_ids": inputs[:4]}, target[:4])


class TestImport:
    def test_gives_back_what_was_exported_to_any_stages(self, tmp_path):
        pipe, other = gpt(2), gpt(3)
        steps(pipe, 2)
        pipe.export(tmp_path / "a.safetensors")
        other.import_weights(tmp_path / "a.safetensors")
        assert same_bits(other.state_dict(), pipe.state_dict())

    def test_one_name_of_a_tied_weight_is_enough(self, tmp_path):
        model = plain_gpt()
        for left_out in ("head.weight", "tokens.weight"):
            file = tmp_path / f"{left_out}.safetensors"
            save_file({n: t.clone() for n, t in model.state_dict().items() if n != left_out}, file)
            pipe = gpt(2)
            pipe.import_weights(file)
            assert same_bits(pipe.state_dict(), model.state_dict())

    def test_a_pipeline_is_made_with_them(self, tmp_path):
        gpt(2).export(tmp_path / "a.safetensors")
        torch.manual_seed(1)
        pipe = Pipeline(plain_gpt(), example=batch(0)[0][:2], stages=3, load=tmp_path / "a.safetensors")
        assert same_bits(pipe.state_dict(), gpt(2).state_dict())

    @pytest.mark.parametrize(
        ("there", "here", "fits"),
        [
            ("bfloat16", "float32", True),
            ("float16", "float32", True),
            ("float8_e4m3fn", "bfloat16", True),
            ("int32", "int64", True),
            ("float32", "bfloat16", False),
            ("bfloat16", "float16", False),
            ("int64", "float32", False),
            ("uint8", "int8", False),
        ],
    )
    def test_types_that_lose_nothing(self, there, here, fits, tmp_path):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].register_buffer("count", torch.zeros(3, dtype=getattr(torch, here)))
        values = torch.tensor([0, 1, 2]).to(getattr(torch, there))
        save_file({**model.state_dict(), "0.count": values}, tmp_path / "a.safetensors")
        pipe = Pipeline(model, example=torch.rand(2, 2), stages=1)
        if fits:
            pipe.import_weights(tmp_path / "a.safetensors")
            assert model[0].count.tolist() == [0, 1, 2]
        else:
            with pytest.raises(InputError, match=rf"0\.count of {there}\[3\], here {here}\[3\]"):
                pipe.import_weights(tmp_path / "a.safetensors")

    def test_refuses_all_that_differs_at_once_and_changes_nothing(self, tmp_path):
        model = plain_gpt().state_dict()
        del model["norm.weight"]
        model = {name: tensor.clone() for name, tensor in model.items()}
        model["more"], model["places.weight"] = torch.ones(2), torch.ones(3, 16)
        save_file(model, tmp_path / "a.safetensors")
        pipe = gpt(2)
        before = state(pipe)
        with pytest.raises(InputError) as caught:
            pipe.import_weights(tmp_path / "a.safetensors")
        for words in ("missing norm.weight", "unknown more", "places.weight of float32[3, 16], here float32[8, 16]"):
            assert words in str(caught.value)
        assert not differences(state(pipe), before)

    def test_refuses_two_values_for_one_weight(self, tmp_path):
        model = {name: tensor.clone() for name, tensor in plain_gpt().state_dict().items()}
        model["head.weight"][3, 3] += 1
        save_file(model, tmp_path / "a.safetensors")
        pipe = gpt(2)
        before = state(pipe)
        with pytest.raises(InputError, match=r"the same values for tokens\.weight and head\.weight"):
            pipe.import_weights(tmp_path / "a.safetensors")
        assert not differences(state(pipe), before)

    def test_refuses_damaged_files_in_one_message(self, tmp_path):
        pipe, path, source = gpt(2), tmp_path / "a.safetensors", random.Random(5)
        pipe.export(path)
        whole, before = path.read_bytes(), state(pipe)
        head = 8 + int.from_bytes(whole[:8], "little")
        damaged = [b"", whole[:7], whole[:head], whole[:-1], whole + b"x", bytes(8) + whole[8:]]
        for _ in range(300):
            data = bytearray(whole)
            data[source.randrange(head)] = source.randrange(256)
            damaged.append(bytes(data))
        refused = 0
        for data in damaged:
            path.write_bytes(data)
            try:
                pipe.import_weights(path)
            except InputError as error:
                assert "a.safetensors" in str(error)  # noqa: PT017
                assert not differences(state(pipe), before)
                refused += 1
            else:  # a byte of the padding, or places of two tensors of one form
                with torch.no_grad():
                    for name, parameter in pipe.model.named_parameters():
                        parameter.copy_(before[name])
        assert refused > 250

    @pytest.mark.parametrize(
        ("index", "words"),
        [
            ("not JSON", "an index of safetensors files"),
            ("[]", "an index of safetensors files"),
            (json.dumps({"weight_map": {"tokens.weight": "../a.safetensors"}}), "a file outside the directory"),
            (json.dumps({"weight_map": {"tokens.weight": "b.safetensors"}}), "nothing there"),
            (json.dumps({"weight_map": {"other": "a.safetensors"}}), "other, which .* says is there"),
        ],
    )
    def test_refuses_damaged_indexes(self, index, words, tmp_path):
        pipe = gpt(1)
        pipe.export(tmp_path / "a.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(InputError, match=words):
            pipe.import_weights(tmp_path)

    @pytest.mark.parametrize(("path", "words"), [("none", "nothing there"), (".", "a directory without")])
    def test_refuses_what_is_no_file(self, path, words, tmp_path):
        with pytest.raises(InputError, match=words):
            gpt(1).import_weights(tmp_path / path)


class TestRefused:
    def test_a_path_that_exists(self, tmp_path):
        path = tmp_path / "a.safetensors"
        path.write_text("mine")
        with pytest.raises(InputError, match="which exists; nothing is overwritten"):
            gpt(2).export(path)
        assert path.read_text() == "mine"
        assert listing(tmp_path) == ["a.safetensors"]

    def test_a_directory_for_a_model_that_is_not_transformers(self, tmp_path):
        with pytest.raises(InputError, match=r"ends in \.safetensors.*give one such as out\.safetensors"):
            gpt(2).export(tmp_path / "out")
        assert listing(tmp_path) == []

    def test_a_type_that_such_a_file_cannot_hold(self, tmp_path):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].register_buffer("wide", torch.zeros(1, dtype=torch.complex128))
        with pytest.raises(InputError, match=r"a safetensors file can hold for 0\.wide, but got complex128"):
            Pipeline(model, example=torch.rand(2, 2), stages=2).export(tmp_path / "a.safetensors")
        assert listing(tmp_path) == []

    def test_a_state_dict_that_a_hook_changes(self, tmp_path):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__(prefix + "bias"))
        with pytest.raises(InputError, match=r"changed by a hook of the model's own: 0\.bias"):
            Pipeline(model, example=torch.rand(2, 2), stages=2).export(tmp_path / "a.safetensors")
