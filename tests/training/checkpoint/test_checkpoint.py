"""Checkpoints of one process: any number of stages loads what any other has saved, and what does not fit is refused."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import lr_scheduler as schedulers

from checkpoints import LENGTH, VOCAB, batch, conv, differences, gpt, listing, momentum, pictures, state, steps
from penstock import InputError, Pipeline
from penstock.models.gpt import GPT
from plain import token_loss

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu_only  # the helpers make their batches in host memory


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By two stages, after three steps: the path, the state, and the losses of the next two steps."""
    path = tmp_path_factory.mktemp("saved") / "step-3"
    pipe = gpt(2)
    steps(pipe, 3)
    pipe.save(path)
    return path, state(pipe), steps(pipe, 2)


@pytest.fixture
def torn(saved, tmp_path):
    """A copy of that checkpoint, to be damaged."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved[0].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


class TestAnyLayout:
    @pytest.mark.parametrize(
        ("stages", "how"),
        [(1, {}), (2, {}), (3, {}), (4, {}), (2, {"schedule": "interleaved", "chunks": 2}), (2, {"schedule": "zb-v"})],
    )
    def test_has_the_same_state_and_the_same_next_loss(self, saved, stages, how):
        path, before, _ = saved
        pipe, plain = gpt(stages, dropout=0.0, **how), gpt(2, dropout=0.0)
        pipe.load(path)
        plain.load(path)
        assert not differences(state(pipe), before)
        mine, theirs = steps(pipe, 3), steps(plain, 3)
        assert mine[0] == theirs[0]
        assert mine == pytest.approx(theirs, rel=1e-6)  # another split adds a tied weight's gradients in another order

    @pytest.mark.parametrize("stages", [1, 3])
    def test_saves_for_any_other(self, stages, tmp_path):
        pipe, other = gpt(stages), gpt(2)
        steps(pipe, 2)
        pipe.save(tmp_path / "a")
        other.load(tmp_path / "a")
        assert not differences(state(other), state(pipe))

    def test_goes_on_as_if_nothing_had_happened(self, saved):
        path, _, losses = saved
        pipe = gpt(2)
        pipe.load(path)
        assert steps(pipe, 2) == losses
        assert pipe.index == 5

    def test_replaces_what_a_trained_pipeline_holds(self, saved):
        path, before, _ = saved
        pipe = gpt(2, lr_scheduler=partial(schedulers.LambdaLR, lr_lambda=lambda step: 0.5))
        steps(pipe, 5)
        pipe.load(path)
        assert not differences(state(pipe), before)

    def test_saving_changes_nothing(self, saved, tmp_path):
        pipe = gpt(2)
        steps(pipe, 2)
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        pipe.save(tmp_path / "a")
        assert torch.equal(torch.get_rng_state(), drawn[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
        steps(pipe, 1)
        assert not differences(state(pipe), saved[1])

    @pytest.mark.parametrize("stages", [1, 2, 3])
    def test_keeps_batch_norms(self, stages, tmp_path):
        pipe = conv(2)
        steps(pipe, 3, pictures)
        pipe.save(tmp_path / "a")
        before, losses = state(pipe), steps(pipe, 2, pictures)
        other = conv(stages)
        other.load(tmp_path / "a")
        assert not differences(state(other), before)
        assert any(key.endswith("running_var") for key in before)
        assert steps(other, 2, pictures) == losses

    @pytest.mark.parametrize("stages", [1, 2, 3])
    def test_finishes_an_accumulation(self, stages, tmp_path):
        pipe = gpt(2, dropout=0.0, accumulate=3)
        steps(pipe, 4)
        pipe.save(tmp_path / "a")
        before, losses = state(pipe), steps(pipe, 3)
        assert before["steps"] == 1
        other = gpt(stages, dropout=0.0, accumulate=3)
        other.load(tmp_path / "a")
        assert not differences(state(other), before)
        assert steps(other, 3) == pytest.approx(losses, rel=1e-6)

    def test_keeps_the_scale_of_fp16(self, tmp_path):
        pipe, other = (gpt(stages, precision="fp16", accumulate=2) for stages in (2, 3))
        steps(pipe, 3)
        pipe.optimizers.scale = 2.0**10
        pipe.save(tmp_path / "a")
        other.load(tmp_path / "a")
        assert not differences(state(other), state(pipe))
        assert other.optimizers.scale == 2.0**10
        plain = gpt(2, accumulate=2)
        plain.load(tmp_path / "a")  # sums that were scaled are what they are without a scale
        name = "norm.weight sum"
        assert torch.equal(state(plain)[name] * 2.0**10, state(pipe)[name])

    def test_weights_alone_where_nothing_is_trained(self, saved):
        pipe = gpt(2, optimizer=None, lr_scheduler=None)
        pipe.load(saved[0])
        assert all(torch.equal(value, saved[1][name]) for name, value in pipe.model.named_parameters())

    def test_what_is_frozen_has_weights_and_no_state(self, tmp_path):
        def part(params):
            return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2)

        pipes = []
        for stages in (2, 3):
            torch.manual_seed(0)
            model = GPT(VOCAB, 16, 2, 4, LENGTH)
            model.blocks[1].requires_grad_(False)
            pipes.append(Pipeline(model, example=batch(0)[0][:2], stages=stages, loss=token_loss, optimizer=part))
        steps(pipes[0], 2)
        pipes[0].save(tmp_path / "a")
        pipes[1].load(tmp_path / "a")
        assert not differences(state(pipes[1]), state(pipes[0]))


class TestOptimizers:
    @pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "RAdam", "Adagrad", "Adamax", "RMSprop", "Adafactor"])
    def test_of_every_kind_keep_their_state(self, name, tmp_path):
        make = getattr(torch.optim, name)
        pipe, other = (gpt(stages, optimizer=lambda params: make(params, lr=1e-3), microbatches=1) for stages in (2, 3))
        steps(pipe, 2)
        pipe.save(tmp_path / "a")
        other.load(tmp_path / "a")
        assert not differences(state(other), state(pipe))

    def test_a_rate_that_is_a_tensor_comes_back_as_one(self, tmp_path):
        def make(params):
            return torch.optim.Adam(params, lr=torch.tensor(1e-3), betas=(0.8, 0.99))

        pipe, other = (gpt(stages, optimizer=make, lr_scheduler=None) for stages in (2, 3))
        steps(pipe, 1)
        for optimizer in pipe.optimizers.optimizers.values():
            optimizer.param_groups[0]["lr"].fill_(0.25)
        pipe.save(tmp_path / "a")
        other.load(tmp_path / "a")
        assert not differences(state(other), state(pipe))
        assert state(other)["norm.weight lr"] == torch.tensor(0.25)

    @pytest.mark.parametrize(
        "make",
        [
            partial(schedulers.StepLR, step_size=2),
            partial(schedulers.MultiStepLR, milestones=[1, 3]),
            partial(schedulers.ExponentialLR, gamma=0.9),
            partial(schedulers.CosineAnnealingLR, T_max=10),
            partial(schedulers.CosineAnnealingWarmRestarts, T_0=2),
            partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=20),
            partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, cycle_momentum=False),
            partial(schedulers.ReduceLROnPlateau, patience=0),
            partial(schedulers.PolynomialLR, total_iters=9),
            lambda o: schedulers.SequentialLR(
                o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
            ),
            lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.9)]),
        ],
    )
    @pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR's own
    def test_every_lr_scheduler_goes_on(self, make, tmp_path):
        pipe, other = (gpt(stages, dropout=0.0, lr_scheduler=make, microbatches=1) for stages in (2, 3))
        steps(pipe, 3)
        pipe.save(tmp_path / "a")
        other.load(tmp_path / "a")
        for _ in range(3):
            steps(pipe, 1), steps(other, 1)
            rates = [{k: v for k, v in state(p).items() if k.endswith((" lr", " momentum"))} for p in (pipe, other)]
            assert not differences(*rates)
            for scheduler, optimizer in zip(
                other.optimizers.schedulers, other.optimizers.optimizers.values(), strict=True
            ):
                assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]

    def test_another_optimizer_is_refused(self, saved):
        pipe = gpt(2, optimizer=momentum)
        before = state(pipe)
        with pytest.raises(InputError, match="written with optimizer SGD, but got AdamW"):
            pipe.load(saved[0])
        assert not differences(state(pipe), before)

    @pytest.mark.parametrize(("make", "named"), [(None, "none"), (partial(schedulers.StepLR, step_size=1), "StepLR")])
    def test_another_lr_scheduler_is_refused(self, saved, make, named):
        with pytest.raises(InputError, match=f"LR scheduler {named}, but got LambdaLR"):
            gpt(2, lr_scheduler=make).load(saved[0])

    def test_groups_that_join_what_was_apart_are_refused(self, saved):
        pipe = gpt(2, optimizer=lambda params: torch.optim.AdamW(params))
        with pytest.raises(InputError, match=r"same settings .* different ones for tokens\.weight and"):
            pipe.load(saved[0])

    def test_parameters_that_were_not_trained_are_refused(self, tmp_path):
        pipe = gpt(2, optimizer=lambda params: torch.optim.AdamW(params[1:]), lr_scheduler=None)
        pipe.save(tmp_path / "a")
        with pytest.raises(InputError, match=r"none for .*tokens\.weight"):
            gpt(2, optimizer=lambda params: torch.optim.AdamW(params), lr_scheduler=None).load(tmp_path / "a")

    def test_a_state_that_is_no_plain_value_is_refused(self, tmp_path):
        class Odd(schedulers.LambdaLR):
            def state_dict(self):
                return {"odd": object()}

        pipe = gpt(2, lr_scheduler=partial(Odd, lr_lambda=lambda step: 1.0))
        with pytest.raises(InputError, match=r"LR scheduler's state\['odd'\] to be made of numbers"):
            pipe.save(tmp_path / "a")
        assert listing(tmp_path) == []


def test_the_users_random_states_come_back(tmp_path):
    pipe = gpt(2)
    torch.manual_seed(11), random.seed(12), np.random.seed(13)
    torch.rand(3), random.gauss(0, 1), np.random.normal(size=3)
    pipe.save(tmp_path / "a")

    def draw():
        return torch.rand(4).tolist(), random.gauss(0, 1), np.random.normal(size=3).tolist()

    first = draw()
    gpt(3).load(tmp_path / "a")
    assert draw() == first


class TestRefused:
    def test_a_path_that_exists(self, saved, tmp_path):
        pipe = gpt(2)
        (tmp_path / "file").write_text("mine")
        for path in (saved[0], tmp_path / "file"):
            with pytest.raises(InputError, match="which exists; nothing is overwritten: give a new path"):
                pipe.save(path)
        assert (tmp_path / "file").read_text() == "mine"
        gpt(2).load(saved[0])

    def test_another_model_with_all_that_differs(self, saved):
        torch.manual_seed(0)
        model = GPT(vocab=29, width=16, heads=2, layers=5, length=8)
        pipe = Pipeline(model, example=batch(0)[0][:2] % 29, stages=2)
        before = state(pipe)
        with pytest.raises(InputError) as caught:
            pipe.load(saved[0])
        said = str(caught.value)
        assert "tokens.weight of float32[31, 16], here float32[29, 16]" in said
        assert all(f"missing {name}" in said for name, _ in model.named_parameters() if name.startswith("blocks.4"))
        assert "head.weight" not in said  # the same weight as tokens.weight
        assert not differences(state(pipe), before)

    def test_another_type(self, saved):
        pipe = gpt(2)
        wide = Pipeline(pipe.model.double(), example=batch(0)[0][:2], stages=2)
        with pytest.raises(InputError, match=r"norm.weight of float32\[16\], here float64\[16\]"):
            wide.load(saved[0])

    def test_names_that_the_model_has_not(self, tmp_path):
        Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), example=torch.rand(2, 2), stages=1).save(
            tmp_path / "a"
        )
        with pytest.raises(InputError, match=r"unknown 1\.bias; unknown 1\.weight"):
            Pipeline(nn.Sequential(nn.Linear(2, 2)), example=torch.rand(2, 2), stages=1).load(tmp_path / "a")

    def test_extra_state(self, tmp_path):
        class Odd(nn.Linear):
            def get_extra_state(self):
                return {"a": 1}

        pipe = Pipeline(nn.Sequential(Odd(2, 2), nn.Linear(2, 2)), example=torch.rand(2, 2), stages=2)
        with pytest.raises(InputError, match="extra state of its own in 0"):
            pipe.save(tmp_path / "a")

    @pytest.mark.parametrize("there", ["nothing", "an empty directory"])
    def test_what_is_no_checkpoint(self, there, tmp_path):
        path = tmp_path / "a"
        if there != "nothing":
            path.mkdir()
        with pytest.raises(InputError, match=r"a/penstock\.json: expected a checkpoint"):
            gpt(2).load(path)


class TestDamaged:
    """One message that names the file, and the pipeline as it was."""

    def refused(self, path: Path, file: str, words: str = "") -> None:
        pipe = gpt(2)
        before = state(pipe)
        with pytest.raises(InputError, match=f"{file}: expected .*{words}.*use another one"):
            pipe.load(path)
        assert not differences(state(pipe), before)

    @pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
    @pytest.mark.parametrize("file", ["__0_0.distcp", "penstock.json"])
    def test_torn(self, torn, file, part):
        data = (torn / file).read_bytes()
        (torn / file).write_bytes(data[: int(len(data) * part)])
        self.refused(torn, file)

    def test_a_file_that_is_missing(self, torn):
        (torn / "__0_0.distcp").unlink()
        self.refused(torn, "__0_0.distcp", "nothing there")

    def test_flipped_bits_of_tensors(self, torn, saved):
        facts = json.loads((torn / "penstock.json").read_text())["facts"]
        data = bytearray((torn / "__0_0.distcp").read_bytes())
        place = data.index(saved[1]["blocks.0.mlp.up.weight"].numpy().tobytes()[:64])
        data[place + 5] ^= 1
        (torn / "__0_0.distcp").write_bytes(bytes(data))
        assert facts["tensors"]["model.blocks.0.mlp.up.weight"]["offset"] < place
        self.refused(torn, "__0_0.distcp", r"model\.blocks\.0\.mlp\.up\.weight as it was written.*checksum")

    def test_flipped_bits_anywhere_are_found_or_do_not_matter(self, tmp_path):
        torn, pipe = tmp_path / "copy", conv(2)
        steps(pipe, 3, pictures)
        pipe.save(torn)
        source, path, before = random.Random(1), torn / "__0_0.distcp", state(pipe)
        whole = path.read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            path.write_bytes(bytes(data))
            try:
                pipe.load(torn)
            except InputError as error:
                assert "__0_0.distcp" in str(error)  # noqa: PT017
            assert not differences(state(pipe), before)

    def test_flipped_facts(self, torn):
        text = (torn / "penstock.json").read_text()
        (torn / "penstock.json").write_text(text.replace('"step": 3', '"step": 7'))
        self.refused(torn, "penstock.json", "checksum")

    def test_another_version(self, torn):
        self.rewrite(torn, lambda facts: facts.update(version=99))
        self.refused(torn, "penstock.json", "version 1, but got ValueError: version 99")

    def test_a_file_elsewhere(self, torn):
        self.rewrite(torn, lambda facts: facts["tensors"]["model.norm.weight"].update(file="../x"))
        self.refused(torn, "penstock.json", "outside the checkpoint")

    def test_facts_that_are_missing(self, torn):
        self.rewrite(torn, lambda facts: facts.pop("random"))
        self.refused(torn, "penstock.json", "random")

    def rewrite(self, path, change):
        """As a stranger might, with the right checksum."""
        from penstock.training.checkpoint.files import _checksum

        facts = json.loads((path / "penstock.json").read_text())["facts"]
        change(facts)
        (path / "penstock.json").write_text(json.dumps({"checksum": _checksum(facts), "facts": facts}))


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_strangers_checkpoint_runs_no_code(torn, tmp_path, file):
    marker = tmp_path / "marker"
    evil = pickle.dumps(Malice(marker))
    size = (torn / file).stat().st_size
    (torn / file).write_bytes(evil + bytes(max(0, size - len(evil))))
    pipe = gpt(2)
    if file == ".metadata":
        pipe.load(torn)  # not even looked at
    else:
        with pytest.raises(InputError, match=r"__0_0\.distcp") as caught:
            pipe.load(torn)
        # torch's own message advises to load it in a way that runs its code
        everything = "".join(traceback.format_exception(caught.value))
        assert "weights_only" not in everything
        assert "trust" not in everything
    assert not marker.exists()


def test_torchs_own_tools_read_it(saved, tmp_path):
    dcp_to_torch_save(str(saved[0]), str(tmp_path / "all.pt"))
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    model = GPT(vocab=31, width=16, heads=2, layers=4, length=8)
    weights = {name.removeprefix("model."): value for name, value in found.items() if name.startswith("model.")}
    assert model.load_state_dict(weights, strict=False).missing_keys == ["head.weight"]  # tied: one name is enough
    assert all(torch.equal(value, saved[1][name]) for name, value in model.named_parameters())


def test_directories_on_the_way_are_made(tmp_path):
    gpt(2).save(tmp_path / "a" / "b" / "step-1")
    assert listing(tmp_path / "a" / "b") == ["step-1"]
    assert listing(tmp_path / "a" / "b" / "step-1") == [".metadata", "__0_0.distcp", "penstock.json"]


def test_a_pipeline_is_made_without_torchs_checkpoints():
    """They take long to import."""
    code = "import sys, penstock; penstock.Pipeline; assert 'torch.distributed.checkpoint' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_counts_come_back_with_their_type():
    from penstock.training.checkpoint.plain_values import read, written

    value = {"a": (1, 2.5, [None, True]), 3: Counter({4: 1}), "t": torch.tensor([[1, 2]]), "n": np.float64(0.5)}
    again = read(json.loads(json.dumps(written(value, "it"))))
    assert again["a"] == value["a"]
    assert isinstance(again[3], Counter)
    assert again[3] == value[3]
    assert torch.equal(again["t"], value["t"])
    assert again["n"] == 0.5
