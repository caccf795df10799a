"""Stages with replicas: five steps give the losses and weights of plain training in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plain
import replicated
from guard_models import UNet
from penstock import Pipeline
from replicated import METHODS, PATTERNS, agree, pipeline

torch.set_num_threads(1)
F64 = torch.float64


@cache
def _gpt() -> tuple[plain.Case, Any]:
    """Tied weights on the first and the last stage; batches of which one has few rows, and what they train to."""
    torch.manual_seed(3)
    model = plain.GPT(layers=4).to(F64)
    batches = [(plain.tokens(rows), plain.tokens(rows)) for rows in (16, 13, 5, 24, 16)]
    given = plain.Case(model, plain.token_loss, batches)
    return given, plain.trained(given)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("replicas", PATTERNS, ids=str)
def test_every_pattern_and_schedule_gives_the_numbers_of_one_process(replicas, method):
    given, whole = _gpt()
    parts = 2 * len(replicas)
    agree(given, replicas, whole, schedule=method, microbatches=parts, verify=False, **METHODS[method])


@pytest.mark.parametrize(
    ("replicas", "recompute", "method"),
    [([3, 2], "always", "1f1b"), ([2, 1, 2], "except-last", "1f1b"), ([1, 2], "always", "zb-h1")],
)
def test_recompute(replicas, recompute, method):
    agree(*_with(_gpt(), replicas), schedule=method, recompute=recompute)


def _with(known: tuple[plain.Case, Any], replicas: list[int]) -> tuple[plain.Case, list[int], Any]:
    return known[0], replicas, known[1]


@pytest.mark.parametrize(("replicas", "offload"), [([2, 1], "activations"), ([1, 3], "weights"), ([2, 2], "all")])
def test_offload(replicas, offload):
    agree(*_with(_gpt(), replicas), offload=offload)


def test_a_replica_without_rows_of_a_micro_batch():
    """A batch of three rows in four micro-batches: one has no row, the others have one, of which two replicas have
    none."""
    given = plain.case("mlp", rows=3)
    for replicas, method in (([3], "zb-h1"), ([3, 1], "1f1b"), ([1, 3], "zb-h1"), ([2, 3], "1f1b"), ([3, 2], "zb-h1")):
        agree(given, replicas, schedule=method)


@pytest.mark.parametrize("replicas", [[2, 1], [2, 3]], ids=str)
@pytest.mark.parametrize("method", ["1f1b", "zb-v"])
def test_clipping_by_the_norm_of_the_whole_models_gradients(replicas, method):
    given = _gpt()[0]
    model = given.fresh()
    optimizer = plain.adamw(model.parameters())
    pipe = pipeline(given, replicas, clip=0.05, schedule=method)
    for x, y in given.batches:
        plain.backward(model, given.loss, x, y)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 0.05, "nothing was clipped"
        assert pipe.step(x, y).gradient_norm == pytest.approx(norm.item(), rel=1e-12)
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


@pytest.mark.parametrize("replicas", [[2, 1], [1, 3]], ids=str)
def test_fp16_scale_halves_on_an_overflow_of_one_replica_and_nobody_updates(replicas):
    given = plain.case("mlp", dtype=torch.float32)
    pipe = pipeline(given, replicas, precision="fp16")
    assert pipe.step(*given.batches[0]).updated
    before, scale = plain.weights(pipe.model), pipe.optimizers.scale
    calls = []

    def once(gradient: Tensor) -> Tensor:
        calls.append(len(calls))
        return gradient * float("inf") if len(calls) == 1 else gradient

    handle = pipe.model[0 if replicas[0] > 1 else 14].weight.register_hook(once)
    assert not pipe.step(*given.batches[1]).updated
    assert len(calls) > 1, "the overflow was to be in one part alone"
    assert pipe.optimizers.scale == scale / 2
    assert plain.off(plain.weights(pipe.model), before) == 0
    handle.remove()
    assert pipe.step(*given.batches[2]).updated
    assert plain.off(plain.weights(pipe.model), before) > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_has_the_gradients_of_a_plain_autocast_loop_over_the_parts(precision):
    given = plain.case("mlp", dtype=torch.float32)
    model, (x, y) = given.fresh(), given.batches[0]
    for a, b in zip(plain.parts_of(x, 8), plain.parts_of(y, 8), strict=True):
        with torch.autocast("cpu", torch.float16 if precision == "fp16" else torch.bfloat16):
            loss = given.loss(model(a), b)
        (loss * 2.0**10).backward()
    wanted = {name: gradient / 2.0**10 / 8 for name, gradient in plain.gradients(model).items()}
    pipe = pipeline(given, [2, 2], precision=precision, optimizer=None)
    pipe.step(x, y)
    assert plain.off(plain.gradients(pipe.model), wanted) < 2e-3
    exact = given.fresh()
    plain.backward(exact, given.loss, x, y)
    assert plain.off(plain.gradients(exact), wanted) > 2e-5, "autocast did nothing"


@pytest.mark.parametrize("replicas", [[2, 1], [2, 3]], ids=str)
def test_accumulation_over_three_steps_is_one_batch_of_all_their_rows(replicas):
    given = plain.case("gpt", steps=6)
    pipe = pipeline(given, replicas, accumulate=3)
    joined = [
        tuple(torch.cat([batch[side] for batch in given.batches[at : at + 3]]) for side in (0, 1)) for at in (0, 3)
    ]
    _, model = plain.trained(plain.Case(given.model, given.loss, joined))
    assert [step.updated for step in pipe.train(given.batches)] == [False, False, True] * 2
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


@pytest.mark.parametrize(("replicas", "method"), [([2, 1, 2], "1f1b"), ([1, 3], "zb-h1"), ([2, 3], "gpipe")])
def test_a_unet_whose_skips_cross_stages(replicas, method):
    torch.manual_seed(4)
    shapes = [(rows, 3, 6, 6) for rows in (8, 8, 5, 8, 12)]
    data = [(torch.randn(shape, dtype=F64), torch.randn(shape, dtype=F64)) for shape in shapes]
    given = plain.Case(UNet(3).to(F64), F.mse_loss, data)
    cuts = ["down.2", "up.1"][: len(replicas) - 1]
    pipe = agree(given, replicas, schedule=method, cuts=cuts)
    assert [edge for edge in pipe.split.edges if edge[1] > edge[0] + 1] == [(0, 2)][: len(replicas) - 2]


@pytest.mark.parametrize("frozen", ["first stage", "last stage", "biases"])
@pytest.mark.parametrize(("replicas", "method"), [([2, 1], "1f1b"), ([1, 3], "zb-h1"), ([2, 2], "1f1b")])
def test_frozen_parameters_stay_and_the_rest_is_right(frozen, replicas, method):
    kinds = {
        "first stage": lambda n: int(n.split(".")[0]) < 8,
        "last stage": lambda n: int(n.split(".")[0]) >= 8,
        "biases": lambda n: n.endswith("bias"),
    }
    given = plain.case("mlp")
    for name, parameter in given.model.named_parameters():
        parameter.requires_grad_(not kinds[frozen](name))
    agree(given, replicas, schedule=method)


class Branches(nn.Module):
    """A layer that is never used, and one that only rows of one kind use, which not every replica has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table, self.idle = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.table)


@pytest.mark.parametrize("replicas", [[2], [2, 1], [2, 2]], ids=str)
def test_parameters_that_nothing_uses_get_no_gradient(replicas):
    torch.manual_seed(0)
    given = plain.Case(Branches().to(F64), F.mse_loss, plain.case("mlp").batches)
    pipe = agree(given, replicas)
    step = pipeline(given, replicas, optimizer=None)
    step.step(*given.batches[0])
    assert all(parameter.grad is None for parameter in step.model.idle.parameters())
    assert step.model.table.grad is not None
    assert plain.off(plain.weights(pipe.model.idle), plain.weights(given.model.idle)) == 0


@pytest.mark.parametrize("replicas", [[2, 1], [1, 3], [2, 2]], ids=str)
def test_an_optimizer_of_two_arguments_gets_names_for_its_groups(replicas):
    def groups(names, params):
        named = list(zip(names, params, strict=True))
        decayed = [p for name, p in named if not name.endswith("bias")]
        plain_ones = [p for name, p in named if name.endswith("bias")]
        rest = [{"params": plain_ones}] if plain_ones else []
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, *rest], lr=1e-2, weight_decay=0.0)

    given = _gpt()[0]
    model = given.fresh()
    optimizer = groups(*zip(*model.named_parameters(), strict=True))
    for x, y in given.batches:
        plain.backward(model, given.loss, x, y)
        optimizer.step()
        optimizer.zero_grad()
    pipe = pipeline(given, replicas, optimizer=groups)
    list(pipe.train(given.batches))
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


class AllTied(nn.Module):
    """One weight that every stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("replicas", [[2, 1, 2], [1, 2, 3], [3, 1, 1]], ids=str)
@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "zb-v"])
def test_a_weight_that_every_stage_uses(replicas, method):
    torch.manual_seed(0)
    given = plain.Case(AllTied().to(F64), F.mse_loss, plain.case("mlp", rows=12).batches)
    agree(given, replicas, schedule=method, microbatches=6, clip=1e9)


class Turned(nn.Module):
    """Rows in the second dimension, as in models that take sequences first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).transpose(0, 1)


class Folded(nn.Module):
    """Rows folded with positions, as in view(rows * length, -1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        x = x.reshape(rows * length, width)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.view(rows, length, width)[..., :4]


@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 3], [2, 3], [2, 1, 2]], ids=str)
@pytest.mark.parametrize("kind", [Turned, Folded])
def test_rows_in_other_dimensions_between_stages(kind, replicas):
    torch.manual_seed(0)
    data = [(torch.randn(rows, 5, 8, dtype=F64), torch.randn(rows, 5, 4, dtype=F64)) for rows in (8, 8, 5, 12, 8)]
    agree(plain.Case(kind().to(F64), F.mse_loss, data), replicas)


class TwoInputs(nn.Module):
    """A table without rows, made by the first stage and used by all others, and a mask of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        table = self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = torch.tanh(layer(x + table)) * mask[..., None]
        return {"scores": x}


@pytest.mark.parametrize("replicas", [[2, 1], [1, 3], [2, 3], [2, 1, 2]], ids=str)
@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
def test_values_without_rows_and_dicts_of_inputs(replicas, method):
    torch.manual_seed(0)
    model = TwoInputs().to(F64)
    batches = [
        ({"x": torch.randn(rows, 5, 8, dtype=F64), "mask": (torch.rand(rows, 5) > 0.3).to(F64)},
         torch.randn(rows, 5, 8, dtype=F64))
        for rows in (8, 8, 5, 12, 8)
    ]  # fmt: skip

    def loss(out: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(out["scores"], target)

    whole = plain.Case(model, loss, batches).fresh()
    optimizer, losses = plain.adamw(whole.parameters()), []
    for given, target in batches:
        value = loss(whole(**given), target)
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    pipe = Pipeline(
        model, example=batches[0][0], stages=len(replicas), replicas=replicas, loss=loss, optimizer=plain.adamw,
        schedule=method,
    )  # fmt: skip
    assert [step.loss for step in pipe.train(batches)] == pytest.approx(losses, rel=1e-12)
    assert plain.off(plain.weights(model), plain.weights(whole)) < replicated.EXACT


@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 3]], ids=str)
def test_a_loss_may_keep_weights_small_of_any_stage(replicas):
    """Also those of stages with replicas, which the last stage alone reads in its loss."""
    given = plain.case("gpt", rows=12)

    def small(model: nn.Module) -> Any:
        weights = list(model.parameters())
        return lambda out, target: given.loss(out, target) + 0.1 * sum(w.square().sum() for w in weights)

    model, whole = given.fresh(), given.fresh()
    loss = plain.backward(whole, small(whole), *given.batches[0])
    pipe = Pipeline(model, example=given.example, stages=len(replicas), replicas=replicas, loss=small(model))
    assert pipe.step(*given.batches[0]).loss == pytest.approx(loss, rel=1e-12)
    assert plain.off(plain.gradients(model), plain.gradients(whole)) < 1e-12


def test_gradients_of_inputs_and_those_that_were_there_before():
    given = plain.case("mlp", rows=12)
    x, y = given.batches[0]
    model, wanted = given.fresh(), x.clone().requires_grad_()
    given.loss(model(wanted), y).backward()
    plain.backward(model, given.loss, *given.batches[1])
    for replicas in ([2], [2, 1], [1, 3]):
        pipe, leaf = pipeline(given, replicas, optimizer=None), x.clone().requires_grad_()
        pipe.step(leaf, y)
        pipe.step(*given.batches[1])
        assert torch.allclose(leaf.grad, wanted.grad, rtol=1e-12)
        assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-12


def test_stage_modules_of_the_users_own():
    given = plain.case("mlp", rows=12)
    wanted = plain.trained(given)[1]
    for replicas, method in (([2, 1], "1f1b"), ([1, 3], "zb-h1")):
        model = given.fresh()
        pipe = Pipeline(
            [model[:8], model[8:]], example=given.example, replicas=replicas, schedule=method, loss=given.loss,
            optimizer=plain.adamw,
        )  # fmt: skip
        list(pipe.train(given.batches))
        assert plain.off(plain.weights(model), plain.weights(wanted)) < 1e-10
