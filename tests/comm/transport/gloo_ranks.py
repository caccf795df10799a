"""What the ranks of the gloo tests do: `python gloo_ranks.py SCENARIO STORE`, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.comm.transport.gloo.mesh import GlooMesh, GlooSender
from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.errors import PenstockError

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OTHERS = [rank for rank in range(SIZE) if rank != RANK]


class Lost(PenstockError):
    """A rank is gone."""


class Patience:
    """Waits at most `limit` seconds, and knows nothing of other ranks but what the connection says."""

    def __init__(self, limit: float) -> None:
        self.limit, self.asked = limit, 0

    def check(self, peer: int, waited: float) -> None:
        self.asked += 1
        if waited > self.limit:
            raise Lost(f"rank {peer} is silent")

    def lost(self, peer: int, error: BaseException) -> Exception:
        return Lost(f"rank {peer} is lost: {error}")


PATIENCE = Patience(30)


@contextmanager
def refused(words: str) -> Iterator[None]:
    """What is within has to end with a `Lost` of these words."""
    try:
        yield
    except Lost as error:
        if words in str(error):
            return
        raise
    raise AssertionError(f"nothing was raised, wanted: {words}")


class Ends:
    """Lanes in both directions to every other rank, several to each."""

    def __init__(self, several: int = 1) -> None:
        self.mesh = GlooMesh(PATIENCE, 30)
        self.to = {
            (peer, n): self.mesh.sender(LaneName(SIZE * n + RANK, SIZE * n + peer), peer)
            for peer in OTHERS
            for n in range(several)
        }
        self.of = {
            (peer, n): self.mesh.receiver(LaneName(SIZE * n + peer, SIZE * n + RANK), peer)
            for peer in OTHERS
            for n in range(several)
        }
        for peer in OTHERS:
            self.mesh.listen(peer)

    def close(self) -> None:
        for end in (*self.to.values(), *self.of.values()):
            end.close()
        self.mesh.close()


def tensors(seed: int) -> dict[int, torch.Tensor]:
    """Of many types, shapes and strides, changing with the seed; both ends can make them."""
    made = torch.Generator().manual_seed(seed)
    n = 1 + seed % 5
    image = torch.randn(n, 3, 4, 5, generator=made)
    return {
        3: image.to(memory_format=torch.channels_last),
        0: torch.randn(n, 7, generator=made).t(),
        12: torch.randn(n, 2, generator=made).bfloat16(),
        4: torch.randint(-9, 9, (n,), generator=made),
        5: torch.tensor(True),
        6: torch.randn(0, n, generator=made),
        7: torch.randn(n, n, generator=made, dtype=torch.complex64),
        8: torch.randn((seed % 3) * 50_000, generator=made),
        9: torch.randn(n, 300, generator=made)[:, ::2],
    }


def same(message: Message, seed: int) -> None:
    wanted = tensors(seed)
    assert list(message.values) == list(wanted)
    for number, tensor in message.values.items():
        want = wanted[number]
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape)
        assert tensor.stride() == (want.stride() if number != 9 else want.contiguous().stride()), number
        assert torch.equal(tensor, want), number
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0
        if tensor.dtype.is_floating_point:
            tensor.add_(1)  # is the receiver's own
    assert message.metadata == b"word" * (seed % 4) * 700
    assert message.stamp == seed


def message(seed: int) -> Message:
    return Message(tensors(seed), b"word" * (seed % 4) * 700, seed)


def round_trips() -> None:
    """Everything to everybody; what comes is asked for in another order than it was sent in."""
    ends = Ends(several=2)
    for run in range(3):
        seeds = range(12)
        for seed in seeds:
            for (peer, n), sender in ends.to.items():
                sender.send(MessageKey(run, seed), message(100 * run + 20 * n + seed + peer))
        kept = []
        for (peer, n), receiver in sorted(ends.of.items(), reverse=run % 2 == 1):
            for seed in random.Random(peer).sample(seeds, len(seeds)):
                kept.append((receiver.receive(MessageKey(run, seed)), 100 * run + 20 * n + seed + RANK))
        for got, seed in kept:
            same(got, seed)
    ends.close()


def stress() -> None:
    """Thousands of messages between all ranks in both directions, sent while others arrive."""
    ends = Ends()
    dice = random.Random(RANK)
    count, sizes = 500, (0, 1, 200, 3000, 70_000)
    waiting = {peer: [] for peer in OTHERS}
    for at in range(count):
        for peer in OTHERS:
            content = Message({at: torch.full((sizes[(at + peer) % 5],), float(at))}, bytes([at % 251]), at)
            ends.to[peer, 0].send(MessageKey(1, at), content)
            waiting[peer].append(at)
        while any(waiting.values()) and (at == count - 1 or dice.random() < 0.7):
            peer = dice.choice([peer for peer in OTHERS if waiting[peer]])
            asked = waiting[peer].pop(dice.randrange(len(waiting[peer])))
            got = ends.of[peer, 0].receive(MessageKey(1, asked))
            value = got.values[asked]
            assert value.numel() == sizes[(asked + RANK) % 5]
            assert bool((value == asked).all())
            assert (got.metadata, got.stamp) == (bytes([asked % 251]), asked)
    ends.close()


def large_in_both_directions() -> None:
    """More than sockets hold, both ways at once, before anybody asks: sends must not wait, nor all come at once."""
    ends = Ends()
    (peer,) = OTHERS
    big = torch.arange(2**20, dtype=torch.float32)
    took = 0.0
    for microbatch in range(24):
        began = time.perf_counter()
        ends.to[peer, 0].send(MessageKey(0, microbatch), Message({0: big + microbatch}))
        took = max(took, time.perf_counter() - began)
    time.sleep(0.5)
    ahead = ends.mesh.peers[peer].incoming._ahead
    assert ahead <= 2**25 + 2**22, ahead
    for microbatch in reversed(range(24)):  # the last first: what was held back has to come
        assert torch.equal(ends.of[peer, 0].receive(MessageKey(0, microbatch)).values[0], big + microbatch)
    print(f"longest send {took:.4f}")
    ends.close()


def memory_is_let_go() -> None:
    """A tensor that the peer has taken is not kept by the sender; what was received dies with its last view."""
    ends = Ends()
    (peer,) = OTHERS
    sender, receiver = ends.to[peer, 0], ends.of[peer, 0]
    sender.send(MessageKey(0, 0), Message({0: torch.zeros(2**26)}))  # 256 MiB: given back to the system when freed
    got = receiver.receive(MessageKey(0, 0))
    sender.send(MessageKey(0, 1), Message())
    receiver.receive(MessageKey(0, 1))  # so the peer has taken the first
    time.sleep(0.3)
    held = resident()
    del got
    assert held > 2**28, held
    assert held < 2**28 + 2**27 + BASE, (held, BASE)
    assert resident() < 2**27 + BASE, (resident(), BASE)
    ends.close()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BASE = resident()


def killed() -> None:
    """Rank 1 dies while all wait for it, and for others: each learns of it, and exits by itself."""
    ends = Ends()
    for peer in OTHERS:
        ends.to[peer, 0].send(MessageKey(0, 0), Message({0: torch.zeros(10)}))
        ends.of[peer, 0].receive(MessageKey(0, 0))
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with refused("rank 1 is lost"):
        ends.of[1, 0].receive(MessageKey(0, 1))
    print(f"noticed after {time.monotonic() - began:.3f}")
    with refused("rank 1 is lost"):
        send_often(ends.to[1, 0])
    sys.exit(3)  # with threads that still listen to living peers


def send_often(sender: GlooSender) -> None:
    """A first send to the dead may still be taken for one that arrives."""
    for microbatch in range(3):
        sender.send(MessageKey(9, microbatch), Message({0: torch.zeros(2**20)}))
        time.sleep(0.1)


def silent() -> None:
    """Rank 1 sends nothing: rank 0 looks around while it waits, and gives up when told to."""
    ends = Ends()
    if RANK == 0:
        PATIENCE.limit = 1.0
        began = time.monotonic()
        with refused("rank 1 is silent"):
            ends.of[1, 0].receive(MessageKey(0, 0))
        assert 0.9 < time.monotonic() - began < 1.6
        assert PATIENCE.asked >= 5
        PATIENCE.limit = 30
        ends.of[1, 0].receive(MessageKey(0, 1))  # nothing is broken by it
    else:
        time.sleep(2)
        ends.to[0, 0].send(MessageKey(0, 1), Message())
    ends.close()


def ended() -> None:
    """Rank 1 closes its lanes: who still waits for a message on one learns of it at once."""
    ends = Ends()
    if RANK == 1:
        ends.close()
        return
    began = time.monotonic()
    with refused("closed the lane"):
        ends.of[1, 0].receive(MessageKey(0, 0))
    assert time.monotonic() - began < 5
    ends.close()


def leave() -> None:
    """A short run with a proper end: code 0, always."""
    ends = Ends()
    for peer in OTHERS:
        ends.to[peer, 0].send(MessageKey(0, 0), Message({0: torch.full((5000,), 1.0 * RANK)}))
    for peer in OTHERS:
        assert ends.of[peer, 0].receive(MessageKey(0, 0)).values[0][7] == peer
    ends.close()


def leave_without_closing() -> None:
    """The script ends as if nothing were: no abort, whatever the order in which ranks go."""
    ends = Ends()
    for peer in OTHERS:
        ends.to[peer, 0].send(MessageKey(0, 0), Message({0: torch.full((5000,), 1.0 * RANK)}))
    for peer in OTHERS:
        assert ends.of[peer, 0].receive(MessageKey(0, 0)).values[0][7] == peer
    dist.barrier()
    time.sleep(0.05 * RANK)


def leave_at_other_times() -> None:
    """Each sends a lot and leaves, late or early: all of it arrives."""
    ends = Ends()
    for microbatch in range(4):
        for sender in ends.to.values():
            sender.send(MessageKey(0, microbatch), Message({0: torch.full((2**20,), 1.0 * microbatch)}))
    time.sleep(0.3 * RANK)
    for microbatch in range(4):
        for receiver in ends.of.values():
            assert bool((receiver.receive(MessageKey(0, microbatch)).values[0] == microbatch).all())
    ends.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[2], SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=30))
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
    print("done")
