"""A rank of the tests of world and watch: joins, walks through rows with a gather in each, and does what it is told.

python rank_loop.py WHAT WHO [--timeout S] [--rows N] [--pause S]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from datetime import timedelta

from penstock.comm.world.world import World, join
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.errors import InputError


def act(what: str, world: World) -> None:
    """In the middle of row 5, on the rank that it is asked of."""
    if what == "raise":
        raise ValueError("no such luck")
    if what == "refuse":
        raise InputError("even numbers", 7, "give another")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "exit":
        sys.exit(0)
    if what == "leave":  # a success, as far as the launcher can see
        os._exit(0)
    if what == "compute":
        time.sleep(100)
    if what == "native":  # blocks in C++, where Python cannot raise
        world.store.wait(["never"], timedelta(seconds=100))
    if what == "hold":  # blocks everything in this process, its monitor too
        re.match(r"(a+)+$", "a" * 60 + "b")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("who", type=int)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--start", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0)
    asked = parser.parse_args()
    world = join(asked.start or None)
    assert world is not None
    world.watch.timeout = asked.timeout
    rank = world.rank
    print(f"rank {rank} begins as {os.getpid()}", flush=True)
    for row in range(asked.rows):
        world.watch.doing(ActionRow(Op.F, rank, row, 0, -1))
        if row == 5 and asked.who in (rank, -1):
            act(asked.what, world)
        got = world.gather(b"%d of %d" % (row, rank))
        assert got == [b"%d of %d" % (row, other) for other in range(world.size)]
        time.sleep(asked.pause)
    world.watch.outside()
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()
