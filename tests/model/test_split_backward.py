"""Models of every kind: input and weight gradients apart have the bits of a plain backward."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from halves import check, device, halves, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def rand(*shape, grad=True):
    return torch.randn(shape, requires_grad=grad)


class Of(nn.Module):
    """A model from its parts and a function of them."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.body = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *inputs):
        return self.body(self, *inputs)


def mlp():
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )


def residual():
    return Of(
        lambda m, x: x + m.down(F.silu(m.up(m.norm(x)))), norm=nn.LayerNorm(6), up=nn.Linear(6, 9), down=nn.Linear(9, 6)
    )


def attention():
    def forward(m, x):
        b, t, d = x.shape
        q, k, v = m.qkv(x).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.out(y.transpose(1, 2).reshape(b, t, d))

    return Of(forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))


def resnet():
    def forward(m, x):
        y = F.relu(m.n1(m.c1(x)), inplace=True)
        return F.relu(m.n2(m.c2(y)) + m.short(x))

    convs = {"c1": nn.Conv2d(3, 4, 3, 2, 1, bias=False), "c2": nn.Conv2d(4, 4, 3, 1, 1, bias=False)}
    return Of(forward, **convs, short=nn.Conv2d(3, 4, 1, 2), n1=nn.BatchNorm2d(4), n2=nn.BatchNorm2d(4))


def tied():
    return Of(
        lambda m, i: F.linear(F.relu(m.mid(m.table(i))), m.table.weight), table=nn.Embedding(11, 6), mid=nn.Linear(6, 6)
    )


def transformer(**settings):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **settings)


def encoder_decoder():
    return nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def self_attention():
    return Of(lambda m, x: m.mha(x, x, x, need_weights=True), mha=nn.MultiheadAttention(8, 2, batch_first=True))


def cross_attention(**settings):
    mha = nn.MultiheadAttention(8, 2, batch_first=True, **settings)
    return Of(lambda m, q, k, v: m.mha(q, k, v, need_weights=False)[0], mha=mha)


def gpt2_layer():
    """The weight lies the other way round, and the bias is added by addmm."""
    return Of(lambda m, x: torch.addmm(m.b, x.view(-1, 6), m.w).view(4, 5, 7), w=torch.randn(6, 7), b=torch.randn(7))


def recurrent(kind):
    return Of(lambda m, x: m.head(m.rnn(x)[0]), rnn=kind(5, 4), head=nn.Linear(4, 2))


def norms(layer):
    return nn.Sequential(nn.Conv1d(4, 4, 3), layer, nn.Conv1d(4, 2, 1))


ids = lambda *shape: torch.randint(0, 11, shape)  # noqa: E731
NORM = {"1.weight", "1.bias"}
TORCH_NORMS = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
RNN = {f"rnn.{kind}_{way}_l0" for kind in ("weight", "bias") for way in ("ih", "hh")}

CASES = {  # model, inputs, parameters whose gradient comes in I
    "mlp": (mlp, lambda: (rand(4, 6),), set()),
    "mlp, three dimensions": (mlp, lambda: (rand(2, 4, 6),), set()),
    "mlp, four dimensions": (mlp, lambda: (rand(2, 3, 4, 6),), set()),
    "mlp, a vector": (mlp, lambda: (rand(6),), set()),
    "mlp, no rows": (mlp, lambda: (rand(0, 6),), set()),
    "mlp, no rows in three dimensions": (mlp, lambda: (rand(2, 0, 6),), set()),
    "mlp, input without gradient": (mlp, lambda: (rand(4, 6, grad=False),), set()),
    "residual": (residual, lambda: (rand(2, 4, 6),), {"norm.weight", "norm.bias"}),
    "attention by hand": (attention, lambda: (rand(2, 5, 8),), set()),
    "resnet block": (resnet, lambda: (rand(2, 3, 8, 8),), {"n1.weight", "n1.bias", "n2.weight", "n2.bias"}),
    "transformer layer": (transformer, lambda: (rand(2, 5, 8),), TORCH_NORMS),
    "transformer layer, norm first": (
        functools.partial(transformer, norm_first=True),
        lambda: (rand(2, 5, 8),),
        TORCH_NORMS,
    ),
    "decoder layer": (
        encoder_decoder,
        lambda: (rand(2, 5, 8), rand(2, 3, 8)),
        TORCH_NORMS | {"norm3.weight", "norm3.bias"},
    ),
    "self-attention": (self_attention, lambda: (rand(2, 5, 8),), set()),
    "cross-attention, packed weight in slices": (
        cross_attention,
        lambda: (rand(2, 5, 8), rand(2, 3, 8), rand(2, 3, 8)),
        set(),
    ),
    "cross-attention, three widths": (
        functools.partial(cross_attention, kdim=4, vdim=6),
        lambda: (rand(2, 5, 8), rand(2, 3, 4), rand(2, 3, 6)),
        set(),
    ),
    "tied embedding": (tied, lambda: (ids(3, 4),), set()),
    "embedding with padding": (lambda: nn.Embedding(11, 3, padding_idx=2), lambda: (ids(3, 4),), set()),
    "embedding scaled by frequency": (
        lambda: nn.Embedding(11, 3, scale_grad_by_freq=True),
        lambda: (ids(3, 4),),
        set(),
    ),
    "embedding with a norm": (lambda: nn.Embedding(11, 3, max_norm=0.5), lambda: (ids(3, 4),), set()),
    "gpt-2 layer": (gpt2_layer, lambda: (rand(4, 5, 6),), set()),
    "lstm": (functools.partial(recurrent, nn.LSTM), lambda: (rand(6, 2, 5),), RNN),
    "gru": (functools.partial(recurrent, nn.GRU), lambda: (rand(6, 2, 5),), RNN),
    "group norm": (lambda: norms(nn.GroupNorm(2, 4)), lambda: (rand(2, 4, 9),), NORM),
    "layer norm": (lambda: norms(nn.LayerNorm(7)), lambda: (rand(2, 4, 9),), NORM),
    "conv 1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), lambda: (rand(3, 4, 11),), set()),
    "conv 2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), groups=2),
        lambda: (rand(3, 4, 7, 8),),
        set(),
    ),
    "conv 3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, dilation=2), lambda: (rand(2, 2, 5, 6, 4),), set()),
    "conv 2d, no batch": (lambda: nn.Conv2d(4, 6, 3), lambda: (rand(4, 7, 8),), set()),
    "conv 2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), lambda: (rand(2, 4, 7, 8),), set()),
    "conv 2d, circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"),
        lambda: (rand(2, 2, 6, 6),),
        set(),
    ),
    "conv 2d, reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"),
        lambda: (rand(2, 2, 6, 6),),
        set(),
    ),
    "conv 2d, same": (lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2), lambda: (rand(2, 2, 6, 6),), set()),
    "conv 2d, valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), lambda: (rand(2, 2, 6, 6),), set()),
    "conv 2d, channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        lambda: (rand(2, 4, 6, 6).detach().to(memory_format=torch.channels_last).requires_grad_(),),
        set(),
    ),
    "transposed conv 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1), lambda: (rand(3, 4, 5),), set()),
    "transposed conv 2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, dilation=2),
        lambda: (rand(2, 4, 5, 4),),
        set(),
    ),
    "transposed conv 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), lambda: (rand(2, 2, 3, 4, 3),), set()),
    "transposed view": (
        lambda: Of(lambda m, x: F.linear(x, m.w.t()), w=torch.randn(6, 4)),
        lambda: (rand(3, 6),),
        set(),
    ),
    "slices": (
        lambda: Of(
            lambda m, x: F.linear(F.linear(x, m.w[:4], m.b[:4]), m.w[2:, :4]), w=torch.randn(7, 6), b=torch.randn(5)
        ),
        lambda: (rand(3, 6),),
        set(),
    ),
    "cast by hand": (
        lambda: Of(lambda m, x: F.linear(x.bfloat16(), m.w.bfloat16()), w=torch.randn(4, 6)),
        lambda: (rand(3, 6),),
        set(),
    ),
    "used three times": (
        lambda: Of(lambda m, x: m.a(F.relu(m.a(F.relu(m.a(x))))), a=nn.Linear(6, 6)),
        lambda: (rand(3, 6),),
        set(),
    ),
}
NOT_WAITING = {
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 2)),
        lambda: (rand(3, 6),),
        {"0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Conv1d(4, 4, 3, bias=False)).eval(),
        lambda: (rand(3, 4, 5),),
        {"parametrizations.weight.original"},
    ),
    "matmul": (lambda: Of(lambda m, x: x @ m.w, w=torch.randn(6, 4)), lambda: (rand(3, 6),), {"w"}),
    "lopsided same": (lambda: nn.Conv1d(2, 3, 2, padding="same"), lambda: (rand(2, 2, 6),), {"weight", "bias"}),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), lambda: (rand(5, 3), rand(5, 4)), {"weight", "bias"}),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 3), lambda: (ids(3, 4),), {"weight"}),
    "no rows for a convolution": (lambda: nn.Conv1d(2, 3, 2), lambda: (rand(0, 2, 6),), {"weight", "bias"}),
    "complex": (
        lambda: nn.Linear(3, 2, dtype=torch.complex64),
        lambda: (torch.randn(4, 3, dtype=torch.complex64),),
        {"weight", "bias"},
    ),
}
ALL = CASES | NOT_WAITING


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_equal_bits(name, dtype):
    build, inputs, early = ALL[name]
    cast = lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t  # noqa: E731
    model = build()
    check(model if name == "complex" else model.to(dtype), tuple(map(cast, inputs())), early)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("build", [mlp, transformer, resnet, attention])
def test_checkpoint(build, reentrant):
    model = build().double()
    shape = {"mlp": (3, 6), "resnet": (2, 3, 8, 8)}.get(build.__name__, (2, 5, 8))
    again = Of(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=model)
    early = {n for n, _ in again.named_parameters() if "norm" in n or ".n1." in n or ".n2." in n}
    check(again, (rand(*shape).detach().double().requires_grad_(),), early)


def test_checkpoint_in_checkpoint():
    inner = Of(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=mlp())
    outer = Of(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=nn.Sequential(nn.Linear(6, 6), inner))
    check(outer, (rand(3, 6),), set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "attention by hand",
        "transformer layer",
        "resnet block",
        "used three times",
        "tied embedding",
        "gpt-2 layer",
    ],
)
def test_autocast(name, dtype):
    build, inputs, early = CASES[name]
    check(build(), inputs(), early, lambda: torch.autocast(device(), dtype=dtype))


@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_in_checkpoint(reentrant):
    model = Of(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=transformer())
    check(
        model,
        (rand(2, 5, 8),),
        {f"block.{n}" for n in TORCH_NORMS},
        lambda: torch.autocast(device(), dtype=torch.bfloat16),
    )


@pytest.mark.parametrize(
    "frozen", [{"0.weight"}, {"0.bias"}, {"0.weight", "0.bias"}, {"2.weight", "4.weight"}, {"4.bias"}]
)
def test_frozen(frozen):
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    lone = {n.replace("weight", "bias") for n in frozen if n.endswith("weight")} - frozen - {"2.bias"}
    check(model, (rand(4, 6),), lone)


def test_all_frozen():
    model = mlp().requires_grad_(False)
    assert halves(model, (rand(4, 6),)).held == 0


def test_part_in_both_halves():
    model = Of(
        lambda m, x: (F.linear(x, m.w) * m.w.square().sum(), (m.w.t() @ m.w)), w=torch.randn(4, 6, dtype=torch.float64)
    )
    x = rand(3, 6).detach().double().requires_grad_()
    expected, found = plain(model, (x,)), halves(model, (x,))
    assert found.early == {"w"}
    torch.testing.assert_close(found.weights["w"], expected.weights["w"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.inputs[0], expected.inputs[0], rtol=0, atol=0)


def test_view_of_a_weight_in_both_halves():
    def forward(m, x):
        q, k = m.w.chunk(2)
        return F.linear(x, q) + x @ k.t()

    model = Of(forward, w=torch.randn(8, 6, dtype=torch.float64))
    x = rand(3, 6).detach().double().requires_grad_()
    expected, found = plain(model, (x,)), halves(model, (x,))
    assert found.early == {"w"}
    torch.testing.assert_close(found.weights["w"], expected.weights["w"], rtol=1e-12, atol=1e-14)


def test_a_weight_that_is_an_input_of_the_stage():
    model = Of(lambda m, x, w: F.linear(x, w) + F.linear(x, w[:1]) + m.a(x), a=nn.Linear(6, 4))
    check(model, (rand(3, 6), rand(4, 6)), set())


def test_second_derivative_in_the_forward():
    """Forces of a potential: the forward differentiates with respect to its input, and the loss goes through that."""

    def forward(m, x):
        y = m.b(torch.tanh(m.c(torch.tanh(m.a(x)).unsqueeze(1)).flatten(1)))
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, force

    model = Of(forward, a=nn.Linear(6, 8), c=nn.Conv1d(1, 2, 3), b=nn.Linear(12, 1)).double()
    x = rand(3, 6).detach().double().requires_grad_()
    expected, found = plain(model, (x,)), halves(model, (x,))
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-12, atol=1e-14)


READS = {
    "transposed": lambda x: x.mT,
    "every other": lambda x: x[..., ::2, :],
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "permuted": lambda x: x.flatten(0, -2).t().contiguous().t(),
    "as it is": lambda x: x,
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_linear_shapes(data):
    lead = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    wide, out = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    read = READS[data.draw(st.sampled_from(sorted(READS)))]
    x = torch.randn(*lead, wide, dtype=torch.float64, requires_grad=data.draw(st.booleans()))
    layer = nn.Linear(read(x).shape[-1] or 1, out, bias=data.draw(st.booleans()), dtype=torch.float64)
    if read(x).shape[-1] == 0:
        return
    check(Of(lambda m, x: m.layer(read(x)), layer=layer), (x,), set())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_convolution_shapes(data):
    n = data.draw(st.integers(1, 3))
    groups, transposed = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{n}d")
    setting = {
        "kernel_size": tuple(data.draw(st.integers(1, 3)) for _ in range(n)),
        "stride": data.draw(st.integers(1, 3)),
        "padding": data.draw(st.integers(0, 1)),
        "dilation": data.draw(st.integers(1, 2)),
        "groups": groups,
        "bias": data.draw(st.booleans()),
    }
    if transposed:
        setting["padding"] = 0
    layer = kind(2 * groups, 3 * groups, **setting, dtype=torch.float64)
    size = (data.draw(st.integers(1, 2)), 2 * groups, *(data.draw(st.integers(5, 7)) for _ in range(n)))
    x = torch.randn(size, dtype=torch.float64, requires_grad=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        x = x[0].detach().requires_grad_(x.requires_grad)
    check(layer, (x,), set())
