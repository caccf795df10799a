"""Running averages of batch norms move as the model's own forward would move them."""

from __future__ import annotations

import copy

import pytest
import torch
from compare import assert_same, pipeline, plain, stepped
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import WIDTH, Of, floats

pytestmark = pytest.mark.usefixtures("one_thread")


class Normed(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), norm(WIDTH)

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


def stack(body=lambda m, x: m.parts(x), norm=nn.BatchNorm1d, **more):
    return Of(body, parts=nn.Sequential(*(Normed(norm) for _ in range(4))), **more).double()


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same_buffers(found, wanted):
    assert found.keys() == wanted.keys()
    for name, buffer in found.items():
        torch.testing.assert_close(buffer, wanted[name], rtol=1e-12, atol=1e-12, msg=name)


def siamese(m, x):
    other = x.flip(1) * 2 + 1
    for part in m.parts:
        x, other = part(x), part(other)
    return m.norm(x) * m.norm(other)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_norm_called_twice_moves_twice(momentum, recompute):
    model = stack(siamese, norm=lambda width: nn.BatchNorm1d(width, momentum=momentum), norm_=None)
    model.norm = nn.BatchNorm1d(WIDTH, momentum=momentum).double()
    theirs = copy.deepcopy(model)
    pipe = pipeline(model, floats(4, WIDTH), cuts=["parts.1", "parts.2"], microbatches=1, recompute=recompute)
    for _ in range(3):
        batch = floats(6, WIDTH)
        pipe.step(batch)
        theirs(batch)
    assert_same_buffers(buffers(model), buffers(theirs))
    assert int(model.norm.num_batches_tracked) == 6


def test_a_norm_called_twice_sees_the_whole_batch_at_each_call():
    model, batch = stack(siamese), floats(6, WIDTH)
    model.parts, model.norm = model.parts[:1], nn.BatchNorm1d(WIDTH).double()
    model.parts[0].norm = nn.Identity()  # rows do not depend on their micro-batch
    model.last = nn.Linear(WIDTH, WIDTH).double()
    model.body = lambda m, x: m.last(siamese(m, x))
    theirs = copy.deepcopy(model)
    pipeline(model, floats(4, WIDTH), cuts=["last"], microbatches=3).step(batch)
    theirs(batch)
    assert_same_buffers(buffers(model), buffers(theirs))


class OwnAverages(nn.BatchNorm1d):
    """Moves its averages by itself, as some published layers do."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.running_mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
                self.num_batches_tracked += 1
        return x - x.mean(0) if self.training else x - self.running_mean


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_norm_with_a_forward_of_its_own_is_left_alone(recompute):
    model = stack(norm=OwnAverages)
    theirs = copy.deepcopy(model)
    pipe = pipeline(model, floats(4, WIDTH), cuts=["parts.1", "parts.2"], recompute=recompute, microbatches=1)
    for _ in range(2):
        batch = floats(6, WIDTH)
        pipe.step(batch)
        theirs(batch)
        assert_same_buffers(buffers(model), buffers(theirs))


def test_an_instance_norms_averages_are_buffers_like_others():
    model = stack(norm=lambda width: nn.InstanceNorm1d(width, track_running_stats=True))
    theirs, batch = copy.deepcopy(model), floats(4, WIDTH, WIDTH)
    pipe = pipeline(model, batch, stages=2, microbatches=1, recompute="always")
    pipe.step(batch)
    theirs(batch)
    assert_same_buffers(buffers(model), buffers(theirs))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_norm_inside_the_users_checkpoint_is_counted_once(reentrant):
    class Checkpointed(Normed):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Of(lambda m, x: m.parts(x), parts=nn.Sequential(Normed(), *(Checkpointed() for _ in range(3)))).double()
    theirs = stack()
    theirs.load_state_dict(model.state_dict())
    ours, other = (pipeline(m, floats(4, WIDTH), cuts=["parts.1", "parts.2"]) for m in (model, theirs))
    for _ in range(2):
        batch = floats(8, WIDTH)
        ours.step(batch)
        other.step(batch)
    assert_same_buffers(buffers(model), buffers(theirs))


def test_a_forward_in_train_mode_moves_them_once():
    model = stack()
    model.parts = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    theirs, batch = copy.deepcopy(model), floats(8, WIDTH)
    pipeline(model, floats(4, WIDTH), stages=2, microbatches=3).forward(batch)
    theirs(batch)
    assert_same_buffers(buffers(model), buffers(theirs))


def test_gradients_with_a_norm_called_twice():
    model, batch = stack(siamese), floats(6, WIDTH)
    model.norm = nn.BatchNorm1d(WIDTH).double()
    pipe = pipeline(model, floats(4, WIDTH), cuts=["parts.1", "parts.2"])
    assert_same(stepped(pipe, batch), plain(model, batch, parts=3))
