"""A lane between two stages of one process."""

from __future__ import annotations

import pytest
import torch

from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.comm.transport.local import LocalLane
from penstock.errors import PenstockError


def test_what_is_sent_comes_in_any_order_once():
    lane = LocalLane(LaneName(0, 1))
    sent = {MessageKey(1, m): Message({m: torch.full((2, m), 1.0 * m)}, b"%d" % m, m) for m in range(4)}
    for key, message in sent.items():
        lane.send(key, message)
    for key in reversed(sent):
        got = lane.receive(key)
        assert (got.metadata, got.stamp, list(got.values)) == (sent[key].metadata, sent[key].stamp, [key.microbatch])
        value = got.values[key.microbatch]
        assert value.data_ptr() == sent[key].values[key.microbatch].data_ptr()
    with pytest.raises(PenstockError, match=r"run 1, micro-batch 3 .* from stage 0 before stage 1"):
        lane.receive(MessageKey(1, 3))


def test_autograd_does_not_cross():
    lane = LocalLane(LaneName(0, 1))
    lane.send(MessageKey(0, 0), Message({0: torch.ones(2, requires_grad=True) * 2}))
    assert not lane.receive(MessageKey(0, 0)).values[0].requires_grad


def test_closing_lets_go():
    lane = LocalLane(LaneName(0, 1))
    lane.send(MessageKey(0, 0), Message())
    lane.close()
    with pytest.raises(PenstockError):
        lane.receive(MessageKey(0, 0))
