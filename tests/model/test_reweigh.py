"""A backward that is given other weights than its forward: right in every operator, or refused by name."""

from __future__ import annotations

import inspect
import os
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import penstock
from operators import OPERATORS, WIDTH, Both, Own, others, ready, values
from penstock.errors import SplitError
from penstock.model.reweigh import Reweigh

torch.set_num_threads(1)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
BF16 = torch.bfloat16


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max((found[name] - wanted[name]).abs().max().item() for name in found)


def saved(module: nn.Module, x: Tensor, host: bool = False) -> Tensor:
    """A forward whose backward can be given other weights."""
    with Reweigh(module.named_parameters(), host, module.buffers()).saving(None):
        return module(x)


def bent(module: nn.Module, x: Tensor, second: dict[str, Tensor], around=nullcontext, **how) -> dict[str, Tensor]:
    """Forward with the module's weights, backward with others."""
    with around():
        made = saved(module, x, **how)
    for name, parameter in module.named_parameters():
        parameter.data = second[name]
    made.backward(torch.ones_like(made).cumsum(0))
    return gradients(module, x)


def written_out(kind: str, first: dict[str, Tensor], second: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in first.items()}
    x = x.detach().clone().requires_grad_()
    made = OPERATORS[kind].written_out(Both(leaves, second), x)
    made.backward(torch.ones_like(made).cumsum(0))
    return {"x": x.grad} | {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_backward_with_other_weights(kind):
    """All gradients are those of the operations written out, at the other weights, and not at the forward's."""
    module, x = ready(kind)
    first, second = values(module), others(module)
    wanted, usual = (written_out(kind, first, weights, x) for weights in (second, first))
    found = bent(module, x, second)
    assert far(found, wanted) < (1e-12 if x.dtype is torch.float64 else 2e-5)
    assert far(found, usual) > 1e-2


def test_with_what_is_saved_kept_in_host_memory():
    for kind in ("Linear", "attention block", "LSTM", "tied"):
        module, x = ready(kind)
        first, second = values(module), others(module)
        wanted = written_out(kind, first, second, x)
        assert far(bent(module, x, second, host=True), wanted) < 1e-12


@pytest.mark.parametrize(
    "kind",
    ["Linear", "Linear without bias", "Linear on sequences", "Conv2d", "MultiheadAttention", "attention block", "tied",
     "MultiheadAttention to others", "used twice", "einsum", "a transpose", "a slice", "every other row", "a row",
     "parts", "another shape", "LayerNorm", "x * w"],
)  # fmt: skip
def test_under_bf16_autocast_the_cast_is_that_of_the_other_weights(kind):
    def autocast():
        return torch.autocast("cpu", BF16)

    module, x = ready(kind)
    module, x = module.float(), x.detach().float().requires_grad_()
    first, second = values(module), others(module)
    with autocast():
        wanted, usual = (written_out(kind, first, weights, x) for weights in (second, first))
    found = bent(module, x, second, autocast)
    size = max(gradient.abs().max().item() for gradient in wanted.values())
    assert far(found, wanted) < 0.02 * size
    assert far(found, usual) > 0.1 * size


def test_parameters_that_are_swapped_for_views_at_another_place_of_a_buffer():
    """The other weights need not lie where the forward's did."""
    module, x = ready("a slice")
    wanted = written_out("a slice", values(module), others(module), x)
    room = torch.randn(100, dtype=torch.float64)
    room[7 : 7 + WIDTH * WIDTH] = others(module)["w0"].flatten()
    found = bent(module, x, {"w0": room[7 : 7 + WIDTH * WIDTH].view(WIDTH, WIDTH)})
    assert far(found, wanted) < 1e-12


class Copies(torch.autograd.Function):
    """x * w, by a copy of the weight that is made inside."""

    @staticmethod
    def forward(ctx, x, w):
        copy = w * 1.0
        ctx.save_for_backward(x, copy)
        return x * copy

    @staticmethod
    def backward(ctx, dy):
        x, copy = ctx.saved_tensors
        return dy * copy, (dy * x).sum(0)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(WIDTH, 5), "weight", amount=0.3)


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(WIDTH, 5))


class Scaled(nn.Module):
    """By a constant of the module's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return F.linear(x, self.linear.weight @ self.scale, self.linear.bias)


SQUARE, ROW = (WIDTH, WIDTH), (WIDTH,)
DERIVED = {
    "exp of w0": lambda: Own(lambda x, w: x * w.exp(), ROW),
    "softplus of w0": lambda: Own(lambda x, w: x * F.softplus(w), ROW),
    "sigmoid of w0": lambda: Own(lambda x, w: x * w.sigmoid(), ROW),
    "silu of w0": lambda: Own(lambda x, w: x * F.silu(w), ROW),
    "add of w0": lambda: Own(lambda x, w: x * (1 + w), ROW),
    "mul of w0": lambda: Own(lambda x, w: x * (2 * w), ROW),
    "reciprocal of w0": lambda: Own(lambda x, w: x / w.reciprocal(), ROW),
    "repeat of w0": lambda: Own(lambda x, w: x * w.repeat(2)[:WIDTH], ROW),
    "cumsum of w0": lambda: Own(lambda x, w: x * w.cumsum(0), ROW),
    "cat of w0, w1": lambda: Own(lambda x, a, b: x @ torch.cat([a, b]), (2, WIDTH), (4, WIDTH)),
    "stack of w0, w1": lambda: Own(lambda x, a, b: x @ torch.stack([a, b], 1), ROW, ROW),
    "mm of w0, w1": lambda: Own(lambda x, a, b: F.linear(x, a @ b), (WIDTH, 2), (2, WIDTH)),
    "linalg_matrix_exp of w0": lambda: Own(lambda x, w: x @ torch.matrix_exp(w), SQUARE),
    "clone of w0": lambda: Own(lambda x, w: x @ w.t().contiguous(), (5, WIDTH)),
    "mm of linear.weight": Scaled,
    "mul of weight_orig": pruned,
    "_weight_norm_interface of parametrizations.weight.original0, parametrizations.weight.original1": lambda: (
        parametrizations.weight_norm(nn.Linear(WIDTH, 5))
    ),
    "_weight_norm_interface of weight_g, weight_v": old_weight_norm,
    "of parametrizations.weight.original": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 5)),
    "of parametrizations.weight.original;": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "mul of w0;": lambda: Own(Copies.apply, ROW),
}  # fmt: skip


@pytest.mark.parametrize("named", ["exp of w0", "clone of w0", "mm of linear.weight"])
def test_what_is_made_of_frozen_weights_is_no_others_for_the_backward(named):
    torch.manual_seed(0)
    module, x = DERIVED[named]().requires_grad_(False), torch.randn(3, WIDTH, requires_grad=True)
    saved(module, x).sum().backward()
    (plain,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(x.grad, plain)


def test_casts_of_frozen_weights_under_autocast_stay_and_those_of_others_follow():
    """The casts of a frozen table and head, of which autograd keeps no history, were once taken for made weights."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH)
    module[2].requires_grad_(False)
    inner, second = torch.tanh(module[0](x)).detach(), values(module) | {"0.weight": torch.randn(WIDTH, WIDTH)}
    found = bent(module, x.requires_grad_(), second, lambda: torch.autocast("cpu", BF16))
    assert found.pop("2.weight") is found.pop("2.bias") is None
    before = torch.ones(3, WIDTH).cumsum(0) @ module[2].weight * (1 - inner**2)
    wanted = {"x": before @ second["0.weight"], "0.weight": before.t() @ x, "0.bias": before.sum(0)}
    assert far(found, wanted) < 0.02 * max(gradient.abs().max().item() for gradient in wanted.values())


@pytest.mark.parametrize("named", DERIVED)
def test_a_weight_made_of_weights_is_refused_by_name(named):
    torch.manual_seed(0)
    module = DERIVED[named]()
    with pytest.raises(SplitError, match="weights that operators use as they are, as views or as casts") as caught:
        saved(module, torch.randn(4, WIDTH, requires_grad=True))
    assert named in str(caught.value)
    assert "pipedream or 2bw" in str(caught.value)


@pytest.mark.parametrize("named", ["_weight_norm_interface of weight_g, weight_v", "exp of w0"])
def test_it_is_refused_on_the_first_stage_too_where_the_input_wants_no_gradient(named):
    with pytest.raises(SplitError, match=f"got {named}"):
        saved(DERIVED[named](), torch.randn(4, WIDTH))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_models_own_is_refused_with_its_line(reentrant):
    lines, first = inspect.getsourcelines(Checkpointed)
    line = first + next(at for at, text in enumerate(lines) if "return checkpoint" in text)
    with pytest.raises(SplitError, match=rf"no checkpoint of the model's own.*test_reweigh.py:{line};"):
        saved(Checkpointed(reentrant), torch.randn(4, WIDTH, requires_grad=True))
    checkpoint(nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True), use_reentrant=reentrant).sum().backward()


class Enter(nn.Module):
    """What models begin with: tokens, learned positions, a learned token in front, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, WIDTH), nn.Embedding(8, WIDTH)
        self.first, self.shift = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 8, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("numbers", torch.arange(8)[None])

    def forward(self, ids):
        x = self.tokens(ids) + self.places(self.numbers[:, : ids.shape[1]]) + self.shift[:, : ids.shape[1]]
        return self.norm(torch.cat([self.first.expand(len(x), -1, -1), x], 1)).exp()


def one_hot(x: Tensor, w: Tensor) -> Tensor:
    return (F.one_hot(x.argmax(-1), WIDTH).float() @ w).relu()


# Weights meet data that wants no gradient, whose size says nothing: one row may be as large as a weight.
ALLOWED = {
    "data times a weight": lambda: Own(lambda x, w: (x * w).exp(), ROW),
    "data plus a weight of its shape": lambda: Own(lambda x, w: (x + w).exp(), (1, WIDTH)),
    "a first layer without bias": lambda: nn.Sequential(nn.Linear(WIDTH, 5, bias=False), nn.ReLU(), nn.Linear(5, 2)),
    "data at a learned power": lambda: Own(lambda x, w: (x.abs() + 1).log().mul(w).exp(), (1, WIDTH)),
    "learned frequencies": lambda: Own(lambda x, w: torch.cat([(x[:, :1] * w).sin(), (x[:, :1] * w).cos()], 1), ROW),
    "a table looked up by one-hot rows": lambda: Own(one_hot, SQUARE),
    "a gate made of data": lambda: Own(lambda x, w: torch.where(x > 0, w, -w).tanh() * x, ROW),
    "a layer on learned queries": lambda: Own(
        lambda x, q, w, b: F.layer_norm(F.linear(q, w, b), (WIDTH,)) * x, ROW, SQUARE, ROW
    ),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ALLOWED)
def test_what_is_made_of_data_is_not_refused(kind, rows):
    torch.manual_seed(0)
    module = ALLOWED[kind]()
    saved(module, torch.randn(rows, WIDTH)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("rows", [1, 3])
def test_embeddings_and_positions_are_not_refused(rows):
    module = Enter()
    saved(module, torch.randint(0, 11, (rows, 5))).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_another_path_is_looked_at_too():
    """A branch that derives a weight is refused when it is first taken, however often another was."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.derive = nn.Parameter(torch.ones(WIDTH)), False

        def forward(self, x):
            return x * (self.w.exp() if self.derive else self.w)

    module, x, paths = Branch(), torch.randn(2, WIDTH, requires_grad=True), (object(), object())
    weigh = Reweigh(module.named_parameters())
    for _ in range(2):
        with weigh.saving(paths[0]):
            module(x)
    module.derive = True
    with pytest.raises(SplitError, match="got exp of w"), weigh.saving(paths[1]):
        module(x)


def tiny(kind: str) -> nn.Module:
    import transformers

    sizes = {
        "gpt2": ("GPT2", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "use_cache": False}),
        "llama": ("Llama", {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "use_cache": False}),
        "bert": ("Bert", {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "max_position_embeddings": 8}),
    }  # fmt: skip
    name, given = sizes[kind]
    head = "ForMaskedLM" if kind == "bert" else "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, name + head)(getattr(transformers, name + "Config")(vocab_size=13, **given))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_transformers_train_by_pipemare(kind):
    model = tiny(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(0, 13, (4, 6))
    pipe = penstock.Pipeline(
        model, example=ids[:1], stages=2, schedule="pipemare", microbatches=4, verify=False,
        loss=lambda out, target: F.cross_entropy(out.logits.flatten(0, 1), target.flatten()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    losses = [step.loss for step in pipe.train([(ids, ids)] * 6)]
    assert losses[-1] < losses[0]
    assert sum(not p.equal(before[name]) for name, p in pipe.model.named_parameters()) > len(before) // 2
