"""Modules in which autograd keeps a weight in every way it can: itself, a view of it, a cast, or nothing at all.

Each comes with the same written out in operations that are linear in their weights, which may be given one set of
weights for the forward and another for the backward. Such an operation keeps nothing of its forward's weights but the
weights themselves, so there is no question what a backward with others is. Shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]
WIDTH = 6


class _Two(torch.autograd.Function):
    """op(x, *w) forward; the backward that op would have at the same x and at other weights."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Tensor], count: int, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.op, ctx.x, ctx.others, ctx.cast = op, x, weights[count:], torch.is_autocast_enabled("cpu")
        return op(x, *weights[:count])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=ctx.cast):
            x = ctx.x.detach().requires_grad_(ctx.x.is_floating_point())
            others = [w.detach().requires_grad_() for w in ctx.others]
            wanted = [x, *others] if x.requires_grad else others
            found = list(torch.autograd.grad(ctx.op(x, *others), wanted, dy))
        return None, None, found.pop(0) if x.requires_grad else None, *found, *(None for _ in others)


class Both:
    """Two sets of weights, by name: of the forward, and of the backward."""

    def __init__(self, first: Weights, second: Weights) -> None:
        self.first, self.second = first, second

    def __call__(self, op: Callable[..., Tensor], x: Tensor, *names: str) -> Tensor:
        first, second = ([made[name] for name in names if name in made] for made in (self.first, self.second))
        return _Two.apply(op, len(first), x, *first, *second)

    def linear(self, x: Tensor, weight: str = "weight", bias: str = "bias") -> Tensor:
        return self(F.linear, x, weight, bias)


@dataclass(frozen=True)
class Operator:
    make: Callable[[], nn.Module]
    draw: Callable[[], Tensor]
    written_out: Callable[[Both, Tensor], Tensor]
    splits: bool = True  # its backward can be had in two halves
    dtype: torch.dtype = torch.float64


class Own(nn.Module):
    """A function of x and of some weights w0, w1, ..."""

    def __init__(self, run: Callable[..., Tensor], *shapes: tuple[int, ...], complex_: bool = False) -> None:
        super().__init__()
        self.run, self.count = run, len(shapes)
        for at, shape in enumerate(shapes):
            drawn = torch.randn(shape, dtype=torch.complex128) if complex_ else torch.randn(shape)
            setattr(self, f"w{at}", nn.Parameter(drawn))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *(getattr(self, f"w{at}") for at in range(self.count)))


class Saves(torch.autograd.Function):
    """x * w, with the weight saved by save_for_backward, or kept as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, as_attribute: bool) -> Tensor:
        ctx.w = w if as_attribute else None
        ctx.save_for_backward(*((x,) if as_attribute else (x, w)))
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *w = ctx.saved_tensors
        return dy * (ctx.w if ctx.w is not None else w[0]), (dy * x).sum(0), None


class Recurrent(nn.Module):
    """An nn.LSTM, nn.GRU or nn.RNN, whose outputs are all that counts."""

    def __init__(self, kind: type[nn.RNNBase], **more: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, 4, batch_first=True, **more)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Attention(nn.Module):
    """torch's own, to itself; or to `others`, for which the packed weight is cut into parts."""

    def __init__(self, others: bool) -> None:
        super().__init__()
        self.mix, self.others = nn.MultiheadAttention(WIDTH, 2, batch_first=True), others

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1) if self.others else x
        return self.mix(x, memory, memory, need_weights=False)[0]


class Block(nn.Module):
    """Attention by hand, residuals, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Flat(nn.Module):
    """Two matrices that lie in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * WIDTH * WIDTH, dtype=torch.float64)
        self.a, self.b = (nn.Parameter(part.view(WIDTH, WIDTH)) for part in flat.split(WIDTH * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.a)), self.b)


class Tied(nn.Module):
    """A matrix that is used as it is, and transposed, and looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        w = self.table.weight
        looked_up = self.table(x.argmax(-1))
        return F.linear(torch.tanh(x @ w), w) + looked_up


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, *shape)


def _norm(kind: Callable[..., Tensor], *more: Any) -> Callable[[Both, Tensor], Tensor]:
    return lambda both, x: both(lambda x, w, b: kind(x, *more, w, b), x, "weight", "bias")


def _by(op: Callable[..., Tensor], *names: str) -> Callable[[Both, Tensor], Tensor]:
    return lambda both, x: both(op, x, *(names or ("weight", "bias")))


def _attend(both: Both, x: Tensor, memory: Tensor) -> Tensor:
    """nn.MultiheadAttention: projections, two heads, and back."""
    packed = ("mix.in_proj_weight", "mix.in_proj_bias")
    part = [slice(at * WIDTH, (at + 1) * WIDTH) for at in range(3)]

    def project(at: int, y: Tensor) -> Tensor:
        projected = both(lambda y, w, b: F.linear(y, w[part[at]], b[part[at]]), y, *packed)
        return projected.unflatten(-1, (2, -1)).transpose(1, 2)

    q, k, v = project(0, x), project(1, memory), project(2, memory)
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    return both.linear(mixed, "mix.out_proj.weight", "mix.out_proj.bias")


def _block(both: Both, x: Tensor) -> Tensor:
    normed = both(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), x, "norm.weight", "norm.bias")
    q, k, v = both.linear(normed, "qkv.weight", "qkv.bias").chunk(3, -1)
    scores = (q @ k.transpose(-2, -1)) / WIDTH**0.5
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    return x + both.linear(mixed, "out.weight", "out.bias")


def _recurrent(cell: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Both, Tensor], Tensor]:
    def run(both: Both, x: Tensor) -> Tensor:
        h, c, made = x.new_zeros(len(x), 4), x.new_zeros(len(x), 4), []
        for at in range(x.shape[1]):
            inner = both.linear(x[:, at], "rnn.weight_ih_l0", "rnn.bias_ih_l0")
            outer = both.linear(h, "rnn.weight_hh_l0", "rnn.bias_hh_l0")
            h, c = cell(inner, outer, h, c)
            made.append(h)
        return torch.stack(made, 1)

    return run


def _lstm(inner: Tensor, outer: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (inner + outer).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inner: Tensor, outer: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (r, z, n), (r_, z_, n_) = inner.chunk(3, -1), outer.chunk(3, -1)
    new, keep = (n + (r + r_).sigmoid() * n_).tanh(), (z + z_).sigmoid()
    return (1 - keep) * new + keep * h, c


def _rnn(inner: Tensor, outer: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return (inner + outer).tanh(), c


def _tied(both: Both, x: Tensor) -> Tensor:
    name, ids = "table.weight", x.argmax(-1)
    inside = both(lambda x, w: x @ w, x, name).tanh()
    return both(F.linear, inside, name) + both(lambda ids, w: w[ids], ids, name)


def _complex(x: Tensor, w: Tensor) -> Tensor:
    """Of rows of pairs of numbers."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.view_as_complex(w))


def _conjugate(x: Tensor, w: Tensor) -> Tensor:
    return torch.view_as_real((x + 0j) * w.conj())


def _last_channel(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(memory_format=torch.channels_last)


def _own(run: Callable[..., Tensor], *shapes: tuple[int, ...], length: int | None = None) -> Operator:
    """Written out as it is: linear in each weight, and each is used once."""
    names = [f"w{at}" for at in range(len(shapes))]
    drawn = rows(WIDTH) if length is None else rows(length, WIDTH)
    return Operator(lambda: Own(run, *shapes), drawn, lambda both, x: both(run, x, *names))


F32 = torch.float32
OPERATORS: dict[str, Operator] = {
    "Linear": Operator(lambda: nn.Linear(WIDTH, 5), rows(WIDTH), _by(F.linear)),
    "Linear without bias": Operator(lambda: nn.Linear(WIDTH, 5, bias=False), rows(WIDTH), _by(F.linear)),
    "Linear on sequences": Operator(lambda: nn.Linear(WIDTH, 5), rows(3, WIDTH), _by(F.linear)),
    "Conv1d": Operator(lambda: nn.Conv1d(3, 4, 3), rows(3, 7), _by(F.conv1d)),
    "Conv2d": Operator(
        lambda: nn.Conv2d(3, 4, 3, 2, 1), rows(3, 7, 7), _by(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1))
    ),
    "Conv2d, channels last": Operator(
        _last_channel(lambda: nn.Conv2d(3, 4, 3)), rows(3, 7, 7), _by(F.conv2d), splits=False
    ),
    "Conv2d by channel": Operator(
        lambda: nn.Conv2d(4, 4, 3, groups=4), rows(4, 7, 7), _by(lambda x, w, b: F.conv2d(x, w, b, groups=4))
    ),
    "ConvTranspose2d": Operator(lambda: nn.ConvTranspose2d(3, 4, 3), rows(3, 5, 5), _by(F.conv_transpose2d)),
    "LayerNorm": Operator(lambda: nn.LayerNorm(WIDTH), rows(3, WIDTH), _norm(F.layer_norm, (WIDTH,))),
    "RMSNorm": Operator(
        lambda: nn.RMSNorm(WIDTH), rows(WIDTH), _by(lambda x, w: F.rms_norm(x, (WIDTH,), w), "weight")
    ),
    "GroupNorm": Operator(lambda: nn.GroupNorm(2, 4), rows(4, 5), _norm(F.group_norm, 2)),
    "BatchNorm": Operator(
        lambda: nn.BatchNorm1d(WIDTH),
        rows(WIDTH),
        lambda both, x: both(
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), x, "weight", "bias"
        ),
    ),
    "PReLU": Operator(lambda: nn.PReLU(WIDTH), rows(WIDTH), lambda both, x: both(F.prelu, x, "weight")),
    "Bilinear": Operator(
        lambda: Own(lambda x, w: F.bilinear(x, x, w), (5, WIDTH, WIDTH)),
        rows(WIDTH),
        lambda both, x: both(lambda x, w: torch.einsum("ni,oij,nj->no", x, w, x), x, "w0"),
    ),
    "MultiheadAttention": Operator(lambda: Attention(others=False), rows(4, WIDTH), lambda b, x: _attend(b, x, x)),
    "MultiheadAttention to others": Operator(
        lambda: Attention(others=True), rows(4, WIDTH), lambda b, x: _attend(b, x, x.flip(1))
    ),
    "attention block": Operator(Block, rows(4, WIDTH), _block),
    "LSTM": Operator(lambda: Recurrent(nn.LSTM), rows(3, WIDTH), _recurrent(_lstm)),
    "LSTM in float32": Operator(lambda: Recurrent(nn.LSTM), rows(3, WIDTH), _recurrent(_lstm), dtype=F32),
    "GRU": Operator(lambda: Recurrent(nn.GRU), rows(3, WIDTH), _recurrent(_gru)),
    "GRU in float32": Operator(lambda: Recurrent(nn.GRU), rows(3, WIDTH), _recurrent(_gru), dtype=F32),
    "RNN": Operator(lambda: Recurrent(nn.RNN), rows(3, WIDTH), _recurrent(_rnn)),
    "two in one buffer": Operator(
        Flat, rows(WIDTH), lambda both, x: both(F.linear, both(F.linear, x, "a").tanh(), "b")
    ),
    "tied": Operator(Tied, rows(WIDTH), _tied),
    "used twice": Operator(
        lambda: Own(lambda x, w: F.linear(F.linear(x, w).relu(), w), (WIDTH, WIDTH)),
        rows(WIDTH),
        lambda both, x: both(F.linear, both(F.linear, x, "w0").relu(), "w0"),
    ),
    "x * w": _own(lambda x, w: x * w, (WIDTH,)),
    "x / by numbers, + w": _own(lambda x, w, b: x / 2 * w + b, (WIDTH,), (WIDTH,)),
    "a slice": _own(lambda x, w: x @ w[1:4].t(), (WIDTH, WIDTH)),
    "every other row": _own(lambda x, w: x @ w[::2].t(), (WIDTH, WIDTH)),
    "a transpose": _own(lambda x, w: x @ w.t(), (5, WIDTH)),
    "a row": _own(lambda x, w: x * w[2], (3, WIDTH)),
    "parts": _own(lambda x, w: x @ w.chunk(2)[1].t(), (8, WIDTH)),
    "expanded": _own(lambda x, w: x * w.expand(4, WIDTH), (1, WIDTH)),
    "another shape": _own(lambda x, w: x @ w.view(WIDTH, 5), (5 * WIDTH,)),
    "einsum": _own(lambda x, w: torch.einsum("nld,dhe->nlhe", x, w), (WIDTH, 2, 4), length=3),
    "a complex view": _own(_complex, (WIDTH // 2, 2)),
    "a conjugate": Operator(
        lambda: Own(_conjugate, (WIDTH,), complex_=True), rows(WIDTH), lambda both, x: both(_conjugate, x, "w0")
    ),
    "a Function that saves it": Operator(
        lambda: Own(lambda x, w: Saves.apply(x, w, False), (WIDTH,)),
        rows(WIDTH),
        lambda both, x: both(torch.mul, x, "w0"),
    ),
    "a Function that keeps it": Operator(
        lambda: Own(lambda x, w: Saves.apply(x, w, True), (WIDTH,)),
        rows(WIDTH),
        lambda both, x: both(torch.mul, x, "w0"),
    ),
}  # fmt: skip


def ready(kind: str) -> tuple[nn.Module, Tensor]:
    """A module and an input that wants a gradient, always the same; weights are nowhere 0 or 1."""
    torch.manual_seed(5)
    operator = OPERATORS[kind]
    module, x = operator.make(), operator.draw().to(operator.dtype)
    if not any(p.is_complex() for p in module.parameters()) and kind != "two in one buffer":
        module.to(operator.dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module, x.requires_grad_()


def others(module: nn.Module) -> Weights:
    """Other values for all weights, laid out in the same way."""
    torch.manual_seed(6)
    return {name: torch.randn_like(p) for name, p in module.named_parameters()}


def values(module: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters()}
