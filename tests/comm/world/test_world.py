"""The World: ranks that find each other, or say which one is missing; bytes between all of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from penstock.comm.world.host import LOOPBACK, identity, interface_to
from penstock.comm.world.rendezvous import launch_environment, start_timeout
from penstock.comm.world.world import join
from penstock.errors import InputError
from ranks import LOOP, Run, by_hand, env, free_port, launched

PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

BYTES = """
import sys, time
import torch.distributed as dist
from penstock.comm.world.world import join
world = join()
rank, size = world.rank, world.size
for lengths in [(0, 0, 0), (1, 2, 3), (1016, 1015, 1016), (1017, 0, 5), (10, 70_000, 1), (0, 0, 3_000_000)]:
    expected = [bytes([r + 1]) * lengths[r] for r in range(size)]
    assert world.gather(expected[rank]) == expected, lengths
    for source in range(size):
        assert world.broadcast(expected[rank] if rank == source else None, source) == expected[source]
        assert world.broadcast(b"ignored" if rank != source else b"mine", source) == b"mine"
assert join() is world
assert len(set(world.hosts)) == 1
began = time.perf_counter()
for _ in range(100):
    world.gather(b"x" * 100)
print("gather", (time.perf_counter() - began) / 100)
"""

ENDS = """
import sys
from penstock.comm.world.world import join
world = join()
def counts():
    return [sys.getrefcount(tensor) for tensor in world.rows._short]
world.rows.wait_released()
own, left = counts(), 0
for _ in range(300):
    for _ in range(3):
        world.gather(b"x")
    left += counts() != own
    world.rows.wait_released()
    assert counts() == own
print("left", left)
"""

USERS_OWN = """
import torch, torch.distributed as dist
from penstock.comm.world.world import join
dist.init_process_group("gloo")
world = join()
assert world.group is not dist.group.WORLD and world.size == dist.get_world_size()
assert world.gather(bytes([world.rank])) == [b"\\0", b"\\1"]
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == 2
"""


def test_alone_without_ranks_or_with_one(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    assert join() is None
    assert launch_environment({**PLACE, "RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "2"}, "expected RANK from 0 to 1, as WORLD_SIZE is 2, but got 2"),
        ({"RANK": "one"}, "expected a whole number in RANK, but got 'one'"),
        ({"MASTER_PORT": "0"}, "expected MASTER_PORT from 1 to 65535, but got 0"),
        ({"MASTER_ADDR": ""}, "but got none for MASTER_ADDR; start the script with torchrun"),
    ],
)
def test_an_environment_that_makes_no_sense_is_one_message(change, message):
    with pytest.raises(InputError, match=message):
        launch_environment({**PLACE, **change})


def test_bytes_of_unequal_sizes_between_all(tmp_path):
    script = tmp_path / "bytes.py"
    script.write_text(BYTES)
    with launched(tmp_path, 3, script=str(script)) as run:
        assert run.wait() == 0, run.said
        assert run.said == ""
        assert len(run.out.read_text().split("gather")) == 4


def test_nothing_is_in_the_hands_of_gloos_threads_at_the_end(tmp_path):
    """They let go of a collective a moment after it is done, and a process that ends within that moment is aborted."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    for attempt in range(4):
        with launched(tmp_path / str(attempt), 2, script=str(script)) as run:
            assert run.wait() == 0, run.said
            assert run.said == ""


def test_a_process_group_of_the_users_own_is_left_alone(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(USERS_OWN)
    with launched(tmp_path, 2, script=str(script)) as run:
        assert run.wait() == 0, run.said
        assert run.said == ""


def test_a_missing_rank_is_named(tmp_path):
    with by_hand(tmp_path, [0, 2], 4, "none", "0", "--start", "3") as runs:
        assert [run.wait() for run in runs] == [1, 1]
        for run in runs:
            assert "expected 4 ranks (WORLD_SIZE) at the start, but ranks 1, 3 are missing after" in run.said


def test_how_long_missing_ranks_are_waited_for_is_a_setting(tmp_path):
    with by_hand(tmp_path, [0], 2, "none", "0", "--start", "0", PENSTOCK_START_TIMEOUT="1.2") as [run]:
        assert run.wait(30) == 1
        assert "but rank 1 is missing after 1 s; look at what they say, or start them" in run.said
        assert "PENSTOCK_START_TIMEOUT in the environment is how many seconds to wait" in run.said


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_wait_that_is_no_number_is_refused(text):
    with pytest.raises(InputError, match=f"above 0 in PENSTOCK_START_TIMEOUT, but got '{text}'"):
        start_timeout({"PENSTOCK_START_TIMEOUT": text})


def test_a_rank_that_ends_while_others_are_waited_for_is_found_at_once(tmp_path):
    """Without a launcher: whoever has come looks at the processes of those that came."""
    port = free_port()
    with by_hand(tmp_path, [0, 1], 3, "none", "0", MASTER_PORT=port) as runs:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        store.wait(["penstock/0/here/1"], timedelta(seconds=60))
        os.kill(runs[1].process.pid, signal.SIGKILL)
        assert runs[0].wait(20) == 1, "ranks are waited for a minute"
        assert "rank 1 ended before all ranks had started; look at its output" in runs[0].said


def test_a_rank_that_the_launcher_sees_end_is_not_waited_for(tmp_path):
    script = tmp_path / "gone.py"
    script.write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], 'begins as', os.getpid(), flush=True)\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(1)\n    sys.exit(3)\n"
        "from penstock.comm.world.world import join\njoin()\n"
    )
    with launched(tmp_path, 3, script=str(script)) as run:
        assert run.wait() == 3
        assert "still running" not in run.said  # those that wait are told, and not ended after some time
        assert run.said.endswith("penstock: rank 1 ended with code 3\n")
        assert run.said.count("rank 1 ended before all ranks had started") == 2


def test_a_missing_rank_0_is_named_by_its_port(tmp_path):
    port = free_port()
    with by_hand(tmp_path, [1], 2, "none", "0", "--start", "2", MASTER_PORT=port) as [run]:
        assert run.wait() == 1
        assert f"expected rank 0 to hold the store of the run at 127.0.0.1:{port}" in run.said
        assert run.said.count("RankError") == 1


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with by_hand(tmp_path, [0], 2, "none", "0", MASTER_PORT=port) as [run]:
            assert run.wait() == 1
            assert f"expected port {port} of 127.0.0.1 (MASTER_PORT) to be free on the host of rank 0" in run.said
            assert "Address already in use" in run.said


def test_something_else_at_the_port_is_an_error_in_bounded_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with by_hand(tmp_path, [1], 2, "none", "0", "--start", "2", MASTER_PORT=port) as [run]:
            assert run.wait() == 1
            assert f"at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT), but rank 1 cannot reach it" in run.said


def test_two_processes_with_one_rank(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": store.port}
    with by_hand(tmp_path, [1, 1], 2, "none", "0", "--start", "3", **more) as runs:
        assert [run.wait() for run in runs] == [1, 1]
        said = "".join(run.said for run in runs)
        assert said.count("expected one process for each rank, but got two with RANK=1") == 1
        assert said.count("but rank 0 is missing after") == 1


def test_ranks_that_disagree_about_their_number(tmp_path):
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, LOOP, "none", "0", "--start", "3"]
    runs = [Run(command, env(RANK=r, WORLD_SIZE=2 + r, **here), tmp_path / str(r)) for r in range(2)]
    try:
        assert [run.wait() for run in runs] == [1, 1]
        for run in runs:
            assert re.search("2 on rank 0 and 3 on rank 1|3 on rank 1 and 2 on rank 0", run.said), run.said
    finally:
        for run in runs:
            run.end()


def test_a_store_that_was_used_before_a_restart(tmp_path):
    """Both attempts meet in the same store, as under torchrun with restarts; the first has left its keys in it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in ("0", "1"):
        more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        with by_hand(tmp_path / attempt, [0, 1], 2, "none", "0", MASTER_PORT=store.port, **more) as runs:
            assert [run.wait() for run in runs] == [0, 0], [run.said for run in runs]
    assert store.check(["penstock/0/here/0", "penstock/1/here/0"])


def test_loopback_alone_listens(tmp_path):
    """What rank 0 opens cannot be reached from outside."""
    with by_hand(tmp_path, [0, 1], 2, "compute", "-1", MASTER_PORT=(port := free_port())) as runs:
        pids = [next(iter(run.begun(1).values())) for run in runs]
        time.sleep(0.2)
        listening = {line for pid in pids for line in _listeners(pid)}
        assert f"0100007F:{port:04X}" in listening
        assert {line.split(":")[0] for line in listening} == {"0100007F"}  # 127.0.0.1


def _listeners(pid: int) -> set[str]:
    """The local addresses on which a process listens, as the kernel writes them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for status_table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{status_table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                found.add(parts[1])
    return found


def test_the_interface_that_leads_to_an_address():
    assert interface_to("127.0.0.1", 80) == LOOPBACK
    assert interface_to("no.such.name.invalid", 80) is None
    assert identity() == identity() != ""
