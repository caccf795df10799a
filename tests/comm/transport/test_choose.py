"""Which transport a lane takes, tried with real ranks; what each does is in choose_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distributed.hosts import HERE, Rank, Ranks, run
from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.comm.transport.open import Facts, kind, open_lanes, requested_transport
from penstock.errors import InputError

SCRIPT = str(Path(__file__).with_name("choose_ranks.py"))


def play(scenario: str, ranks: int, *, fork: bool = True, **environment: str) -> list[Rank]:
    ended = run([SCRIPT, scenario], [HERE] * ranks, fork=fork, **environment)
    assert all(rank.out.endswith("done\n") for rank in ended)
    return ended


def kinds(rank: Rank) -> dict[str, str]:
    found: dict[str, str] = json.JSONDecoder().raw_decode(rank.out)[0]
    return found


def test_ranks_of_one_host_share_memory():
    first, second = play("everyday", 2)
    assert kinds(first) == {"0>1": "shared", "1>0": "shared", "0>2": "shared", "2>0": "shared"} | {
        "2>3": "shared",
        "3>2": "shared",
    }
    assert kinds(second) == kinds(first) | {"1>2": "local"}
    assert first.error == second.error == ""


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_gloo_where_it_is_wanted(way):
    if way == "argument":
        ranks = play("wanted_gloo", 3)
    else:
        ranks = play("everyday", 3, PENSTOCK_TRANSPORT="gloo")
    assert {kind for rank in ranks for kind in kinds(rank).values()} == {"gloo", "local"}


def test_without_shared_memory_at_the_start_both_ends_take_gloo():
    ranks = play("no_memory_at_start", 3)
    found = {name: way for rank in ranks for name, way in kinds(rank).items()}
    assert {name: way for name, way in found.items() if name in ("1>2", "1>0", "4>3", "4>5")} == dict.fromkeys(
        ("1>2", "1>0", "4>3", "4>5"), "gloo"
    )
    assert found["0>1"] == "shared"  # rank 0 has the memory of its own
    assert ["which is slower" in rank.out for rank in ranks] == [False, True, False]


def test_a_message_without_memory_goes_over_gloo_and_is_not_missed():
    ranks = play("no_memory_later", 3)
    assert all(set(kinds(rank).values()) <= {"shared", "local"} for rank in ranks)
    assert ["which is slower" in rank.out for rank in ranks] == [True, False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_with_one_gpu_for_all_share_memory():
    for rank in play("one_gpu_for_all", 2):
        first, second = rank.out.splitlines()[:2]
        assert set(json.loads(first).values()) <= {"shared", "local"}
        assert set(json.loads(second).values()) <= {"gloo", "local"}


def test_ranks_that_disagree_are_told_so():
    for rank in play("different_wishes", 2):
        assert "the same transport on every rank, but got None on rank 0 and gloo on rank 1" in rank.out
    for rank in play("different_lanes", 2):
        assert "the same lanes between stages, but got different ones on rank 1 and rank 0" in rank.out


def test_everything_arrives_from_a_rank_that_leaves_early():
    for way in ("shared", "gloo"):
        for rank in play("leaves_early", 3, PENSTOCK_TRANSPORT=way):
            assert rank.error == ""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_a_finished_run_exits_with_0_again_and_again(way):
    for number in range(10):
        play("everyday", 2, fork=number > 0, PENSTOCK_TRANSPORT=way)


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_a_rank_that_ends_in_the_middle_ends_all(way):
    with Ranks() as ranks:
        ranks.start([SCRIPT, "deserter"], [HERE] * 3, PENSTOCK_TRANSPORT=way)
        ended = ranks.wait(60)
    for rank in (0, 2):
        assert ended[rank].code == 1, ended[rank].error
        assert float(ended[rank].out.split()[0]) < 5
        assert "rank" in ended[rank].error


def test_kinds_by_where_the_ranks_are():
    def fact(host: str, gpu: str | None = None, nccl: bool = False, requested: str | None = None) -> Facts:
        return Facts(host, gpu, nccl, requested, "")

    assert kind(fact("a"), fact("a")) == "shared"
    assert kind(fact("a"), fact("b")) == "gloo"
    assert kind(fact("a", "gpu 0", True), fact("a", "gpu 1", True)) == "nccl"
    assert kind(fact("a", "gpu 0", True), fact("b", "gpu 0", True)) == "nccl"
    assert kind(fact("a", "gpu 0", True), fact("a", "gpu 0", True)) == "shared"
    assert kind(fact("a", "gpu 0", False), fact("a", "gpu 1", True)) == "shared"
    assert kind(fact("a", "gpu 0", False), fact("b", "gpu 1", False)) == "gloo"
    assert kind(fact("a", "gpu 0", True, "gloo"), fact("a", "gpu 1", True, "gloo")) == "gloo"
    with pytest.raises(InputError, match="ranks on different hosts"):
        kind(fact("a", requested="shared"), fact("b", requested="shared"))


def test_a_transport_that_is_not_there(monkeypatch):
    with pytest.raises(InputError, match=r"transport= to be one of shared, gloo, but got 'tcp'"):
        requested_transport("tcp")
    monkeypatch.setenv("PENSTOCK_TRANSPORT", "pigeon")
    with pytest.raises(InputError, match="PENSTOCK_TRANSPORT to be one of"):
        requested_transport(None)
    assert requested_transport("gloo") == "gloo"


def test_stages_of_one_rank_need_no_ranks():
    class Single:
        rank, hosts, store, watch = 0, ("here",), None, None

        def gather(self, data):
            return [data]

    lanes = open_lanes(Single(), [LaneName(0, 1)], ((0,), (0,)), torch.device("cpu"))
    lanes.senders[LaneName(0, 1)].send(MessageKey(0, 0), Message({0: torch.ones(1)}))
    assert lanes.receivers[LaneName(0, 1)].receive(MessageKey(0, 0)).values[0] == 1
    assert lanes.kinds == {LaneName(0, 1): "local"}
    lanes.close()
