"""The Watch: whatever happens to one rank, all end within five seconds, and say which one, where and why."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.comm.watch.monitor import WaitClock
from penstock.comm.watch.report import Failure, RankStatus, rank_status, timeout_failure
from penstock.comm.watch.status import EVERYBODY, PageField, RankState, StatusPage, StatusPageReader
from penstock.comm.watch.watch import Watch
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.errors import RankError
from ranks import LOOP, Run, all_gone, by_hand, env, free_port, launched

LIMIT = 5.0  # seconds in which all have to end


def shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "penstock" in path.name or "torch" in path.name}


def test_a_rank_killed_at_a_random_moment_ends_all_and_is_named(tmp_path):
    before, dice = shm(), random.Random(4)
    for attempt in range(4):
        victim = dice.randrange(3)
        with launched(tmp_path / str(attempt), 3, "none", "0", "--rows", "100000") as run:
            pids = run.begun(3)
            time.sleep(dice.random() * 0.5)
            os.kill(pids[victim], signal.SIGKILL)
            all_gone([*pids.values()], LIMIT)
            assert run.wait() == 128 + signal.SIGKILL
            place = rf"{victim}F\d+ \(stage {victim}, micro-batch \d+\)"
            for other in {0, 1, 2} - {victim}:
                assert re.search(
                    f"rank {other} stops: rank {victim} died in {place} without reporting an error", run.said
                ), run.said
            ended = rf"penstock: rank {victim} ended by signal 9 \(SIGKILL\), possibly out of memory, in {place}\n"
            assert re.search(ended, run.said), run.said
            assert "Traceback" not in run.said
    assert shm() == before


@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_exception_shows_its_traceback_once_and_first(tmp_path, who):
    with launched(tmp_path, 3, "raise", str(who)) as run:
        assert run.wait() == 1
        line = f"rank {who} failed in {who}F5 (stage {who}, micro-batch 5): ValueError: no such luck"
        assert run.said.startswith("Traceback (most recent call last):\n"), run.said
        assert run.said.count("Traceback") == 1
        assert run.said.index(f'File "{LOOP}"') < run.said.index(line)
        for other in {0, 1, 2} - {who}:
            assert f"rank {other} stops: {line}\n" in run.said
        assert run.said.endswith(f"penstock: rank {who} ended with code 1\n")


def test_what_every_rank_refuses_is_said_once(tmp_path):
    with launched(tmp_path, 3, "refuse", "-1") as run:
        assert run.wait() == 1
        assert run.said.count("Traceback") == 1, run.said
        assert "InputError: expected even numbers, but got 7; give another" in run.said


def test_a_failure_ends_ranks_that_compute_or_wait_in_native_code(tmp_path):
    script = tmp_path / "busy.py"
    script.write_text(
        "import sys, runpy\nfrom penstock.comm.world.world import join\nworld = join()\n"
        "what = ['raise', 'compute', 'native'][world.rank]\n"
        f"sys.argv = ['x', what, str(world.rank)]\nrunpy.run_path({LOOP!r}, run_name='__main__')\n"
    )
    with launched(tmp_path, 3, script=str(script)) as run:
        pids = run.begun(3)
        all_gone([pids[0]], 60)
        all_gone([*pids.values()], LIMIT)
        assert run.wait() == 1
        for other in (1, 2):
            place = f"{other}F5 (stage {other}, micro-batch 5)"
            line = f"rank {other} stops in {place}: rank 0 failed in 0F5 (stage 0, micro-batch 5): ValueError"
            assert line in run.said, run.said


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    with launched(tmp_path, 2, "exit", "1") as run:
        assert run.wait() == 1
        assert "rank 0 stops: rank 1 has ended, but rank 0 waits for it in 0F5 (stage 0, micro-batch 5)" in run.said


def test_a_rank_that_leaves_by_os_exit_is_named_and_not_the_one_that_waits_for_it(tmp_path):
    """Its code is 0: the other, which can only stop, was once named."""
    with launched(tmp_path, 2, "leave", "1") as run:
        assert run.wait() == 1
        place = r"in 1F5 \(stage 1, micro-batch 5\)"
        assert re.search(
            rf"rank 0 stops: rank 1 died {place} without reporting an error: .*, or left by os._exit\n", run.said
        ), run.said
        waited = "while other ranks still waited for it"
        left = rf"penstock: rank 1 left with code 0 {place}, {waited}: does its code call os._exit\?\n"
        assert re.search(left, run.said), run.said


def test_under_torchrun_too(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", LOOP]
    run = Run([*command, "leave", "1"], env(), tmp_path)
    try:
        assert run.wait() != 0
        cause = run.said.split("Root Cause")[1]
        assert "rank 1 died in 1F5 (stage 1, micro-batch 5) without reporting an error" in cause, run.said
    finally:
        run.end()


def test_where_a_rank_is_in_words():
    status_page = StatusPage()
    page = StatusPageReader(status_page.file.path)
    assert page.place == "while it was starting"
    status_page.fields[PageField.STATE] = RankState.RUNNING
    assert page.place == "before its first step"
    status_page.name_stages([5, 2])
    assert page.place == "before its first step (stages 2, 5)"
    status_page.doing(ActionRow(Op.B, 5, 3, 0, -1))
    assert page.place == "in 5B3 (stage 5, micro-batch 3)"
    status_page.outside()
    status_page.outside()
    assert page.place == "between two steps, after 5B3 (stage 5, micro-batch 3)"


MEET = """
import os
from penstock.comm.world.world import join
world = join()
print(f"rank {world.rank} begins as {os.getpid()}", flush=True)
meet = {"a gather": world.barrier, "a broadcast from rank 0": lambda: world.broadcast(b"x", 0)}
"""


@pytest.mark.parametrize(
    "kinds",
    [("a gather", "a broadcast from rank 0"), ("a broadcast from rank 0", "a gather")],
    ids="first {0[0]}".format,
)
def test_collectives_of_two_kinds_that_wait_for_each_other_are_found_at_once(tmp_path, kinds):
    """Also where rank 0, whose broadcast need not wait, has gone on to the next one."""
    script = tmp_path / "meet.py"
    script.write_text(f"{MEET}meet[{kinds}[world.rank]]()\nmeet['a gather']()\n")
    with launched(tmp_path, 2, script=str(script)) as run:
        run.begun(2)
        assert run.wait(20) == 1  # ranks wait for each other for two minutes
        words = f"rank 0 has come to {kinds[0]} and rank 1 to {kinds[1]} as collective 2; every rank has to leave"
        assert words in run.said, run.said


@pytest.mark.parametrize(
    ("what", "sign"),
    [
        ("stop", r"has sent no heartbeat for \d\.\d s: is stopped \(SIGSTOP\)"),
        ("hold", r"has sent no heartbeat for \d\.\d s: is stopped, or stuck in native code"),
        ("compute", "computes, waits for no rank"),
    ],
)
def test_a_rank_that_does_not_come_is_found_by_the_time_out(tmp_path, what, sign):
    with launched(tmp_path, 3, what, "1", "--timeout", "4") as run:
        run.begun(3)
        assert run.wait() != 0
        said = run.said
        assert re.search(
            r"rank 0 has waited 4\.\d s for all ranks, longer than the time-out: "
            rf"rank 0 waits for rank 1; rank 1: in 1F5 \(stage 1, micro-batch 5\) for \d\.\d s; {sign}",
            said,
        ), said
        assert said.count("what each rank is doing:") == 1
        assert re.search(
            r"  rank 2: in 2F5 \(.*\) for \d\.\d s; waits for all ranks in collective 7 for \d\.\d s\n", said
        )
        assert "the main thread of rank 0 (innermost call last):\n" in said
        if what == "compute":
            shown = said.split("the main thread of rank 1 (innermost call last):\n")[1]
            assert "time.sleep(100)" in shown
        else:
            assert "penstock: rank 1 sent no heartbeat and was killed\n" in said


@pytest.mark.parametrize("what", ["none", "native"])
def test_ctrl_c_ends_all(tmp_path, what):
    """Also where Python cannot raise KeyboardInterrupt, as the main thread is in native code."""
    with launched(tmp_path, 2, what, "-1", "--rows", "100000") as run:
        pids = run.begun(2)
        time.sleep(0.5)
        os.killpg(run.process.pid, signal.SIGINT)
        all_gone([*pids.values()], LIMIT)
        assert run.wait() == 128 + signal.SIGINT
        assert "Traceback" not in run.said, run.said
        words = "was interrupted" if what == "none" else r"was told to end \(SIGINT\)"
        assert re.search(rf"rank \d {words} in \dF\d+ \(stage \d, micro-batch \d+\)", run.said), run.said


def test_sigterm_to_the_launcher_and_to_one_rank(tmp_path):
    for to_rank in (False, True):
        with launched(tmp_path / str(to_rank), 2, "none", "0", "--rows", "100000") as run:
            pids = run.begun(2)
            os.kill(pids[1] if to_rank else run.process.pid, signal.SIGTERM)
            all_gone([*pids.values()], LIMIT)
            assert run.wait() == 128 + signal.SIGTERM
            assert ("penstock: rank 1 ended by signal 15 (SIGTERM), in 1F" in run.said) == to_rank


def test_a_handler_of_the_users_own_still_handles(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import os, signal, time\nfrom penstock.comm.world.world import join\ncame = []\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))\n"
        "world = join()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\n"
        "except KeyboardInterrupt:\n    came.append(2)\n"
        "time.sleep(4)\nworld.barrier()\nassert came == [15, 2], came\n"
    )
    with launched(tmp_path, 2, script=str(script)) as run:
        assert run.wait() == 0, run.said


def test_a_killed_launcher_takes_its_workers_along(tmp_path):
    with launched(tmp_path, 2, "compute", "-1") as run:
        pids = run.begun(2)
        os.kill(run.process.pid, signal.SIGKILL)
        all_gone([*pids.values()], LIMIT)


def test_under_torchrun_a_killed_agent_takes_its_workers_along(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    run = Run([*torchrun, str(free_port()), LOOP, "compute", "-1"], env(), tmp_path)
    try:
        pids = run.begun(2)
        os.kill(run.process.pid, signal.SIGKILL)
        all_gone([*pids.values()], LIMIT)
    finally:
        run.end()


def test_torchrun_restarts_after_a_death(tmp_path):
    script = tmp_path / "once.py"
    script.write_text(
        "import os, signal\nfrom penstock.comm.world.world import join\nworld = join()\n"
        "for row in range(20):\n    world.gather(b'x')\n"
        "    if row == 10 and world.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        # one write a line: ranks share the pipe, and where output is not buffered print() writes a word at a time
        "os.write(1, f'finished {world.rank} {os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}\\n'.encode())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), str(script)],
        env=env(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["finished 0 1", "finished 1 1"]


def test_torchrun_names_the_rank_at_fault(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*command, str(free_port()), LOOP, "raise", "1"], env=env(), capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n"), done.stderr
    cause = done.stderr.split("Root Cause")[1]
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "ValueError: no such luck" in cause


def test_a_death_without_a_launcher(tmp_path):
    """Rank 0 holds the store: its death takes that along."""
    for who in (0, 1):
        with by_hand(tmp_path / str(who), [0, 1, 2], 3, "kill", str(who)) as runs:
            codes = [run.wait() for run in runs]
            assert codes == [-signal.SIGKILL if rank == who else 1 for rank in range(3)]
            for rank in {0, 1, 2} - {who}:
                assert runs[rank].said.startswith(f"rank {rank} stops: rank {who} died in {who}F5 (stage {who}")
                assert runs[rank].said.count("\n") == 1


@pytest.mark.slow
def test_a_clean_run_exits_0_and_leaves_nothing(tmp_path):
    before = shm()
    for attempt in range(10):
        with launched(tmp_path / str(attempt), 2, "none", "0") as run:
            assert run.wait() == 0, run.said
            assert run.said == ""
            all_gone([*run.pids().values()], 0.1)
    assert shm() == before


# -- pieces, in this process ------------------------------------------------------------------------------------------


def test_saying_what_comes_next_costs_less_than_a_microsecond():
    doing, best = StatusPage().doing, 1e9
    rows = [ActionRow(Op.F, 1, part, 0, -1) for part in range(10_000)]
    for _ in range(20):
        began = time.thread_time_ns()
        for row in rows:
            doing(row)
        best = min(best, (time.thread_time_ns() - began) / 10_000)
    assert best < 1000


def test_a_board_is_read_by_others_while_it_changes():
    status_page = StatusPage()
    page = StatusPageReader(status_page.file.path)
    status_page.doing(ActionRow(Op.B, 0, 0, 0, -1))
    status_page.wait(3, time.monotonic_ns() - 2_000_000_000)
    status_page.beat()
    status = rank_status(page, os.getpid())
    assert (status.state, status.row, status.peer, status.silent) == (
        RankState.STARTING,
        "0B0 (stage 0, micro-batch 0)",
        3,
        False,
    )
    assert 2.0 <= status.waited < 3.0
    status_page.doing(ActionRow(Op.RECV_F, 1, 6, 2, 0))
    assert rank_status(page, os.getpid()).row == "1F6<0@2 (stage 1, micro-batch 6)"
    status_page.doing(ActionRow(Op.UPDATE, 1, -1, 3, -1))
    assert rank_status(page, os.getpid()).row == "1U@3 (stage 1)"
    status_page.outside()
    assert rank_status(page, os.getpid()).row == ""
    assert rank_status(page, os.getpid()).peer is None
    status_page.publish_failure(Failure(1, "rank 1 failed").encode())
    assert page.state == RankState.FAILED
    assert Failure.decode(page.report()) == Failure(1, "rank 1 failed")


def status(peer: int | None = None, beat: float = 0.1, collectives: int = 0) -> RankStatus:
    return RankStatus(RankState.RUNNING, "F", 1.0, peer, 1.0, beat, collectives)


@pytest.mark.parametrize(
    ("peers", "chain", "rank"),
    [
        (
            {0: status(1), 1: status(2), 2: status()},
            "rank 0 waits for rank 1, rank 1 waits for rank 2; rank 2: in F",
            2,
        ),
        ({0: status(1), 1: status(0)}, "rank 0 waits for rank 1, rank 1 waits for rank 0; they wait for each other", 0),
        (
            {0: status(1), 1: status(2, beat=9.0), 2: status()},
            "rank 0 waits for rank 1; rank 1: in F for 1.0 s; has sent no",
            1,
        ),
        (
            {0: status(EVERYBODY, 0.1, 3), 1: status(EVERYBODY, 0.1, 3), 2: status(None, 0.1, 2)},
            "rank 0 waits for rank 2",
            2,
        ),
    ],
)
def test_the_waiting_leads_to_the_rank_at_fault(peers, chain, rank):
    found = timeout_failure(0, peers[0].peer, 5.0, peers)
    assert chain in found.line
    assert found.rank == rank


def test_a_sight_survives_the_way_through_the_store():
    seen = status(EVERYBODY, 0.5, 4)
    later = RankStatus.decode(seen.encode(), 2.0)
    assert (later.state, later.peer, later.collectives, later.beat_age) == (RankState.RUNNING, EVERYBODY, 4, 2.5)
    assert later.silent


def test_the_time_in_which_a_process_was_itself_stopped_does_not_count():
    wait_clock = WaitClock()
    for tick in range(10):
        assert wait_clock.running_seconds(100 + tick * 0.2, tick * 0.2) == pytest.approx(tick * 0.2)
    assert wait_clock.running_seconds(161.8, 61.8) == pytest.approx(1.8)  # away for a minute
    assert wait_clock.running_seconds(162.0, 62.0) == pytest.approx(2.0)
    assert wait_clock.running_seconds(162.0, 0.5) == pytest.approx(0.5)  # another wait


def test_a_rank_that_failed_itself_goes_nowhere(capsys):
    watch = Watch(1, 2)
    watch.doing(ActionRow(Op.B, 1, 2, 0, -1))
    try:
        raise KeyError("weights")
    except KeyError as error:
        watch.failed(error)
    said = capsys.readouterr().err
    assert "test_a_rank_that_failed_itself_goes_nowhere" in said
    assert said.endswith("rank 1 failed in 1B2 (stage 1, micro-batch 2): KeyError: 'weights'\n")
    watch.failed(ValueError("a consequence"))
    assert capsys.readouterr().err == ""
    with pytest.raises(RankError, match="rank 1 failed in 1B2"):
        watch.check(0, 0.0)
