"""torch.func between a model's blocks and inside them: vmap over masks, gradients in a forward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline, SplitError

WIDTH, PARTS = 6, 2


class Masked(nn.Module):
    """Makes its mask by vmap, as transformers do: from positions, and from an input that says what is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        near = torch.vmap(lambda at: (at >= places) & (at - places < 3))(places)
        mask = torch.vmap(lambda row: near & row[None].bool())(keep).to(x.dtype).sum(-1, keepdim=True)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask
        return x


class Double(torch.autograd.Function):
    """A custom Function that transforms can take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(row: Tensor) -> Tensor:
        return row * 2

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


class Called(Masked):
    """Calls a custom Function and modules inside its transform."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(x, torch.vmap(lambda row: Double.apply(self.inner(row)) / 2)(keep))


class Slope(nn.Module):
    """Adds the gradient of its layer by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.layer(row)).sum()))
        return x + slope(x.flatten(0, 1)).view_as(x)


class Slopes(nn.Module):
    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.layers, self.outside = nn.ModuleList(Slope() for _ in range(4)), outside

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        if self.outside:
            x = x + torch.func.grad(lambda row: (row * row * row).sum())(keep[0, 0] * torch.ones(WIDTH, dtype=x.dtype))
        for layer in self.layers:
            x = layer(x)
        return x


MAKES = {
    "mask": Masked, "inside": lambda: Slopes(False), "both": lambda: Slopes(True), "called": lambda: Called(nn.ReLU())
}  # fmt: skip


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
def test_it_trains_as_the_whole_model_does(make):
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    batches = [(torch.randn(4, length, WIDTH).double(), torch.ones(4, length).double()) for length in (5, 7, 5)]
    for _, keep in batches:
        keep[1:, 3:] = 0
    pipe = Pipeline(
        model, example=batches[0], stages=3, microbatches=PARTS, loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, keep in batches:
        pipe.step((x, keep), x * 2)
        optimizer.zero_grad()
        F.mse_loss(plain(x, keep), x * 2).backward()
        optimizer.step()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted, rtol=0, atol=1e-13)


def test_a_transform_of_what_blocks_make_is_refused_between_them():
    class Outside(Masked):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return torch.vmap(lambda row: row * 2)(super().forward(x, keep))

    with pytest.raises(SplitError, match=r"transforms of torch\.func between modules") as caught:
        Pipeline(Outside(), example=(torch.randn(2, 5, WIDTH), torch.ones(2, 5)), stages=2, loss=F.mse_loss)
    assert "test_transforms.py" in str(caught.value)


def test_a_module_with_weights_inside_a_transform_between_blocks_is_refused():
    with pytest.raises(SplitError, match=r"Linear of what the model makes, inside one at .*test_transforms\.py"):
        Pipeline(
            Called(nn.Linear(5, 5)), example=(torch.randn(2, 5, WIDTH), torch.ones(2, 5)), stages=2, loss=F.mse_loss
        )
