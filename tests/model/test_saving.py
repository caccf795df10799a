"""Activations in host memory: whatever autograd saves, and however the user has wrapped it."""

from __future__ import annotations

import pytest
import torch
from compare import assert_same, pipeline, plain, stepped
from torch.utils.checkpoint import checkpoint
from zoo import WIDTH, Of, blocks, floats

from penstock.model.offload import to_device, to_host

pytestmark = pytest.mark.usefixtures("one_thread")


def row(rows=4, length=6):
    return floats(rows, length, WIDTH)


def offloaded(body, recompute="never"):
    model = Of(body, blocks=blocks(4)).double()
    pipe = pipeline(model, row(), cuts=["blocks.1", "blocks.2"], offload=True, recompute=recompute)
    for batch in (row(5, 7), row(3, 5)):
        assert_same(stepped(pipe, batch), plain(model, batch))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_expanded_and_overlapping_tensors_that_autograd_saves(recompute):
    def body(m, x):
        x = m.blocks[0](x)
        mean = x.mean(1, keepdim=True).expand_as(x)
        x = m.blocks[1](x) * mean  # saves an expanded tensor, which also crosses
        windows = x.unfold(1, 3, 1)
        return m.blocks[3](m.blocks[2](x) * mean)[:, :3] + (windows * windows.sin()).sum((1, 3)).unsqueeze(1)

    offloaded(body, recompute)


def test_a_users_checkpoint_over_open_code():
    def region(m, x):
        return m.blocks[1](x).tanh() * 2

    def body(m, x):
        x = checkpoint(region, m, m.blocks[0](x), use_reentrant=False)
        return m.blocks[3](m.blocks[2](x.sin()))

    offloaded(body)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, :1].expand(4, 6),
        lambda x: x[0, 0].expand(4, 6),
        lambda x: x.unfold(1, 3, 1),
        lambda x: x[:, ::2],
        lambda x: x[:0],
        lambda x: torch.complex(x, x).conj(),
    ],
)
def test_a_way_to_the_host_and_back(make):
    tensor = make(floats(4, 6))
    kept = to_host(tensor)
    assert kept.device.type == "cpu"
    assert torch.equal(to_device(kept, tensor.device), tensor)


def test_an_expanded_tensor_takes_no_more_room_than_its_core():
    kept = to_host(floats(1, 4).expand(1000, 4))
    assert kept.untyped_storage().nbytes() == 4 * 8
