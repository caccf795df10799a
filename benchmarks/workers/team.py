"""A team of processes, one a rank, that a conductor tells what to do next.

The conductor only waits meanwhile, so whatever else the cores do can be told apart from the ranks' work: see
`penstock.profiler.quiet`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta

PATIENCE = 120.0  # seconds for one answer


class Team:
    """`ranks` processes; in each, `make(rank, *options)` gives an object whose methods the conductor calls."""

    def __init__(self, ranks, make, *options):
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks when they import torch
        spawn, port = multiprocessing.get_context("spawn"), _free_port()
        self.lines, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, rank, ranks, port, make, options), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def ask(self, method, *arguments):
        """Call a method on every rank at once; the answers in rank order."""
        for line in self.lines:
            line.send((method, arguments))
        return self._answers()

    def _answers(self):
        end, found = time.monotonic() + PATIENCE, []
        for rank, line in enumerate(self.lines):
            if not line.poll(max(0.0, end - time.monotonic())):
                raise SystemExit(f"rank {rank} does not answer within {PATIENCE:.0f} seconds")
            try:
                good, answer = line.recv()
            except EOFError:
                raise SystemExit(f"rank {rank} has ended") from None
            if not good:
                raise SystemExit(f"rank {rank} failed\n{answer}")
            found.append(answer)
        return found


def _serve(line, rank, ranks, port, make, options):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    try:
        worker = make(rank, *options)
        line.send((True, None))
        while True:
            method, arguments = line.recv()
            line.send((True, getattr(worker, method)(*arguments)))
    except EOFError:  # the conductor is done, or gone
        worker.close()
    except Exception:
        with suppress(BrokenPipeError):  # another rank's failure came first
            line.send((False, traceback.format_exc()))
        sys.exit(1)
    dist.destroy_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
