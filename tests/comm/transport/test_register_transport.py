"""A transport from outside the package, written in one file (registered_ranks.py): between real processes, by name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import penstock
from comm.transport.registered_ranks import StoreReceiver, StoreSender, train
from distributed.hosts import HERE, Ranks, run
from penstock import InputError
from penstock.comm.transport import registered

torch.set_num_threads(1)
SCRIPT = str(Path(__file__).with_name("registered_ranks.py"))


def test_three_ranks_train_over_it():
    """Each of 4 mini-batches has 4 micro-batches; rank 0 sends 16 activations, rank 1 both ways, rank 2 gradients."""
    ranks = [json.loads(rank.out.splitlines()[-1]) for rank in run([SCRIPT], [HERE] * 3)]
    inline = train(None)
    for losses, _ in ranks:
        assert losses == pytest.approx(inline, rel=1e-6)
    assert all(sent >= 16 for _, sent in ranks)
    assert ranks[1][1] >= 32


def test_a_rank_that_dies_ends_the_others_that_wait_on_it():
    started = time.monotonic()
    with Ranks() as ranks:
        ranks.start([SCRIPT, "leaves"], [HERE] * 3)
        ended = ranks.wait(60)
    assert time.monotonic() - started < 60
    assert ended[1].code == 3
    for rank in (0, 2):
        assert ended[rank].code == 1
        assert "rank 1" in ended[rank].error


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.setattr(registered, "_registered", {})


def test_a_name_is_known_once_it_is_registered():
    with pytest.raises(InputError, match="transport= to be one of shared, gloo, but got 'store'"):
        train("store")
    penstock.register_transport("store", StoreSender, StoreReceiver)
    assert len(train("store")) == 4  # in one process, which has no lanes
    with pytest.raises(InputError, match="one of shared, gloo, store, but got 'stone'"):
        train("stone")


@pytest.mark.parametrize("name", ["shared", "gloo", "nccl", "local"])
def test_built_in_names_are_refused(name):
    with pytest.raises(InputError, match=f"a name of your own for the transport, but got '{name}'"):
        penstock.register_transport(name, StoreSender, StoreReceiver)


def test_ends_that_cannot_be_called():
    with pytest.raises(InputError, match="receiver to be a function of a Link, but got int"):
        penstock.register_transport("store", StoreSender, 3)
