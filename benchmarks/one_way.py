"""One message from a process to another of the same host: ours, gloo and the limit, in one run.

    python -m benchmarks.one_way [--repetitions 15] [--seconds 0.3]

One line a size: half of a round trip. Ours as the engine does it: one float32 tensor a message, sent, received, and
dropped when the next one is awaited. gloo is `torch.distributed.send` and `recv` into a tensor that is there. The limit
is one copy into shared memory and a semaphore that the other process polls without sleep (ours polls for 20 us and
then sleeps, so at 4 MB it has to be woken). Medians; repetitions interleaved in shuffled order; those in which other
processes used the cores are made again, and where there was no quiet, that is said. One thread a process.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.mapping import Semaphore
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.sender import SharedSender
from penstock.profiler.quiet import quiet_sample

SIZES = {"1 KB": 1 << 10, "4 MB": 4 << 20}
WANTED = {"1 KB": 0.1, "4 MB": 0.25}  # ours over gloo's
TRIES = 6  # for a quiet sample

copy = ctypes.CDLL(None).memcpy
copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


class Patience:
    def check(self, peer, waited):
        if waited > 60:
            raise TimeoutError("the other process is silent")

    def lost(self, peer, error):
        return error


class Ours:
    def __init__(self, rank, store):
        self.rank, self.run = rank, 0
        self.sender = SharedSender(LaneName(rank, 1 - rank), store, Patience(), 1 - rank)
        self.receiver = SharedReceiver(LaneName(1 - rank, rank), store, Patience(), 1 - rank)

    def play(self, tensor, count):
        self.run += 1
        send, receive, run, first = self.sender.send, self.receiver.receive, self.run, self.rank == 0
        got, message = None, Message({0: tensor})
        for at in range(count):
            key = MessageKey(run, at)
            if first:
                send(key, message)
            got = None  # in the shadow of the other's turn, as a stage drops what it has read
            got = receive(key).values[0]
            if not first:
                send(key, message)
        assert torch.equal(got, tensor)


class Gloo:
    def __init__(self, rank, store):
        self.rank = rank
        dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)

    def play(self, tensor, count):
        first, other, got = self.rank == 0, 1 - self.rank, torch.empty_like(tensor)
        for _ in range(count):
            if first:
                dist.send(tensor, other)
            dist.recv(got, other)
            if not first:
                dist.send(tensor, other)


class Limit:
    """Two semaphores and room for a tensor each way, in one piece of memory that rank 0 makes."""

    def __init__(self, rank, store):
        size, room = 4096 + 2 * max(SIZES.values()), mapping.BYTES
        if rank == 0:
            self.file = mapping.create("limit")
            mapping.allocate(self.file, 0, size)
        else:
            self.file = os.open(store.get("limit").decode(), os.O_RDWR)
        self.piece = mapping.map_piece(self.file, 0, size)
        there, here = (self.piece[at * room : (at + 1) * room] for at in (rank, 1 - rank))
        self.out, self.back = Semaphore(there, create=rank == 0), Semaphore(here, create=rank == 0)
        self.target = mapping.address_of(self.piece) + 4096 + rank * max(SIZES.values())
        self.first = rank == 0
        if rank == 0:
            store.set("limit", f"/proc/{os.getpid()}/fd/{self.file}")

    def play(self, tensor, count):
        post, taken, size = self.out.post, self.back.try_take, tensor.nbytes
        for _ in range(count):
            if self.first:
                copy(self.target, tensor.data_ptr(), size)
                post()
            while taken():
                pass
            if not self.first:
                copy(self.target, tensor.data_ptr(), size)
                post()


WAYS = {"ours": Ours, "gloo": Gloo, "limit": Limit}


def ways(rank, path):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(path, 2)
    return {name: way(rank, store) for name, way in WAYS.items()}


def follow(path, pipe):
    """The other process."""
    mine = ways(1, path)
    tensors = {size: torch.ones(size // 4) for size in SIZES.values()}
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        way, size, count = asked
        mine[way].play(tensors[size], count)
    dist.destroy_process_group()


class Pair:
    """Both processes; this one is rank 0 and keeps the time."""

    def __init__(self, path):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=follow, args=(path, theirs), daemon=True)
        self.process.start()
        self.mine = ways(0, path)
        assert self.pipe.recv() == "ready"

    def seconds(self, way, tensor, count):
        """One way, of so many round trips."""
        self.pipe.send((way, tensor.nbytes, count))
        begin = time.perf_counter()
        self.mine[way].play(tensor, count)
        return (time.perf_counter() - begin) / count / 2

    def end(self):
        self.pipe.send(None)
        self.process.join(20)


def case(pair, size, repetitions, seconds):
    """Medians by way, and the fewest quiet samples that one has."""
    tensor = torch.ones(size // 4)
    counts = {way: int(seconds / 2 / min(pair.seconds(way, tensor, 20) for _ in range(5))) + 1 for way in WAYS}
    quiet = {way: [] for way in WAYS}
    loud = {way: [] for way in WAYS}
    for _ in range(TRIES * repetitions):
        for way in random.sample(sorted(WAYS), len(WAYS)):
            if len(quiet[way]) < repetitions:
                pair.seconds(way, tensor, 3)  # what ran before has left its mark on caches
                with quiet_sample() as sample:
                    spent = pair.seconds(way, tensor, counts[way])
                (quiet if sample.quiet else loud)[way].append(spent)
    fewest = min(map(len, quiet.values()))
    return {way: statistics.median(quiet[way] or loud[way]) for way in WAYS}, fewest


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=15, help="quiet samples of each")
    options.add_argument("--seconds", type=float, default=0.3, help="that a sample lasts")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(str(Path(folder) / "store"))
        for name, size in SIZES.items():
            found, fewest = case(pair, size, chosen.repetitions, chosen.seconds)
            ours, gloo, limit = (found[way] * 1e6 for way in WAYS)
            noise = "" if fewest == chosen.repetitions else f"   NOISY: {fewest} quiet samples"
            print(
                f"{name}   ours {ours:7.1f} us   gloo {gloo:7.1f} us   limit {limit:7.1f} us   "
                f"ours / gloo {ours / gloo:.3f} (wanted {WANTED[name]:.2f})   ours / limit {ours / limit:.2f}{noise}",
                flush=True,
            )
        pair.end()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
