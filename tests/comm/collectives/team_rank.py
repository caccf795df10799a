"""A rank of a team: `python team_rank.py SOCKET`, with RANK and so on set. Its functions are called by name."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from sums import Spec, made, raw
from torch import Tensor

from penstock.comm.collectives.interface import Pending, Reducer
from penstock.comm.collectives.open import open_reducer
from penstock.comm.world.world import join
from penstock.errors import PenstockError

WORLD = join(60)
assert WORLD is not None
RANK = WORLD.rank
pending: list[Pending] = []


def tensors(specs: Sequence[Spec], seed: int, rank: int = RANK) -> list[Tensor]:
    return [made(spec, 100 * seed + at, rank) for at, spec in enumerate(specs)]


@cache
def reducer(ranks: tuple[int, ...]) -> Reducer:
    return open_reducer(WORLD, ranks, torch.device("cpu"))


def reduce(ranks: tuple[int, ...], specs: Sequence[Spec], seeds: Sequence[int], nap: float = 0.0) -> list[list[bytes]]:
    """One reduction a seed, all started before the first is waited for."""
    time.sleep(nap)
    given = [tensors(specs, seed) for seed in seeds]
    started = [reducer(ranks).start(each) for each in given]
    results = [one.wait() for one in started]
    assert all(one.done() for one in started)
    for before, after in zip(given, results, strict=True):
        assert [(t.shape, t.dtype) for t in before] == [(t.shape, t.dtype) for t in after]
        assert all(a is b for a, b in zip(before, after, strict=True) if b.is_contiguous() and a.is_contiguous())
    return [[raw(tensor) for tensor in each] for each in results]


def scatter(ranks: tuple[int, ...], spec: Spec, bounds: Sequence[int], seed: int) -> bytes:
    (flat,) = tensors([spec], seed)
    kept = flat.clone()
    (part,) = reducer(ranks).reduce_scatter(flat, bounds).wait()
    assert raw(flat) == raw(kept)
    return raw(part)


def gather(ranks: tuple[int, ...], dtype: str, bounds: Sequence[int], seed: int, inside: bool) -> bytes:
    """`inside`: the part is its place in the tensor that is gathered into."""
    at = ranks.index(RANK)
    own = made(((bounds[at + 1] - bounds[at],), dtype, ""), seed, RANK)
    out = torch.zeros(bounds[-1], dtype=own.dtype)
    if inside:
        out[bounds[at] : bounds[at + 1]] = own
        own = out[bounds[at] : bounds[at + 1]]
    (found,) = reducer(ranks).all_gather(own, out, bounds).wait()
    assert found is out
    return raw(out)


def refused(ranks: tuple[int, ...], specs: dict[int, Sequence[Spec]]) -> str:
    """The refusal that each rank gets, from a reducer for it alone; that one has no use any more."""
    own = open_reducer(WORLD, ranks, torch.device("cpu"))
    try:
        first = said(lambda: own.start(tensors(specs[RANK], 1)).wait())
        then = said(lambda: own.start([]).wait())
        return first if first == then else f"first {first}, then {then}"
    finally:
        own.close()


def refused_parts(ranks: tuple[int, ...], bounds: dict[int, list[int]]) -> str:
    own = open_reducer(WORLD, ranks, torch.device("cpu"))
    try:
        return said(lambda: own.reduce_scatter(torch.ones(4), bounds[RANK]).wait())
    finally:
        own.close()


def refused_gather(ranks: tuple[int, ...], bounds: list[int]) -> str:
    return said(lambda: reducer(ranks).all_gather(torch.ones(2), torch.ones(4), bounds))


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except PenstockError as error:
        return str(error)
    return "not refused"


def unusual(what: str) -> str:
    everybody = tuple(range(WORLD.size))
    given = {
        "sparse": [torch.ones(2), torch.eye(3).to_sparse()],
        "bool": [torch.ones(2, dtype=torch.bool)],
        "meta": [torch.ones(2, device="meta")],
    }
    return said(lambda: reducer(everybody).start(given[what]))


def opened(ranks: tuple[int, ...], device: str = "cpu") -> str:
    return said(lambda: open_reducer(WORLD, ranks, torch.device(device)))


def on_gpus(ranks: tuple[int, ...]) -> str:
    """Whole numbers, which any order of adding sums alike, made by kernels that take their time."""
    own, n, at = open_reducer(WORLD, ranks, torch.device("cuda", 0)), len(ranks), ranks.index(RANK)
    big, bounds = torch.randn(4096, 4096, device="cuda"), [0, 5, *[1000 * number for number in range(1, n)]]
    wanted = torch.arange(bounds[-1], device="cuda") * n + sum(ranks)
    good = []
    for _ in range(3):
        for _ in range(5):
            big = big @ big
            big = big / big.norm()
        late = (big.isnan().sum() * 0 + RANK).float()
        flat = torch.arange(bounds[-1], device="cuda") + late
        both = [flat.clone(), flat.to(torch.float64).reshape(1, -1), flat[:0]]
        sums, part = own.start(both), own.reduce_scatter(flat, bounds)
        good += [bool((each.flatten() == wanted[: each.numel()]).all()) for each in sums.wait()]
        (mine,) = part.wait()
        good.append(torch.equal(mine, wanted[bounds[at] : bounds[at + 1]].float()))
        (whole,) = own.all_gather(mine, torch.zeros_like(flat), bounds).wait()
        good.append(torch.equal(whole, wanted.float()))
    own.close()
    return "as expected" if all(good) else f"{good}"


def unlike_on_gpus(ranks: tuple[int, ...]) -> str:
    own = open_reducer(WORLD, ranks, torch.device("cuda", 0))
    return said(lambda: own.start([torch.ones(3 + (RANK == 1), device="cuda")]).wait())


def overlapping(ranks: tuple[int, ...]) -> str:
    """A tensor twice, one that is in another, a conjugate, one that repeats a number, one that autograd follows."""
    whole = torch.arange(100_000.0)
    followed = torch.ones(5, requires_grad=True)
    twist = torch.arange(4).to(torch.complex64) * 1j
    given = [whole, whole, whole[10:50], twist.conj(), torch.ones(1).expand(9), followed]
    wanted = [len(ranks) * tensor.detach().clone() for tensor in given]
    version = whole._version
    sums = reducer(ranks).start(given).wait()
    good = all(torch.equal(a.detach(), b) for a, b in zip(sums, wanted, strict=True))
    return "as expected" if good and whole._version > version else f"{sums}"


def begin(ranks: tuple[int, ...], specs: Sequence[Spec], seed: int) -> float:
    """Start, and do not wait; the seconds that it took."""
    given = tensors(specs, seed)
    began = time.perf_counter()
    pending.append(reducer(ranks).start(given))
    return time.perf_counter() - began


def finish() -> list[bytes]:
    return [raw(tensor) for tensor in pending.pop(0).wait()]


def is_done() -> list[bool]:
    return [one.done() for one in pending]


def memory() -> dict[str, int]:
    """Bytes of shared memory that this process has mapped, by whose they are, and files that it has open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "memfd:penstock-reduce" in line]
    size = sum(int(stop, 16) - int(start, 16) for start, stop in ends)
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {"mapped": size, "segments": len(ends), "open": sum("penstock-reduce" in file for file in files)}


def forked(ranks: tuple[int, ...]) -> int:
    """A child has no part in it: its end changes nothing, and it may not start one."""
    own, pid = reducer(ranks), os.fork()
    if pid == 0:
        try:
            own.start([torch.ones(1)])
        except PenstockError:
            own.close()
            os._exit(7)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dies_amid(ranks: tuple[int, ...], victim: int, after: float, size: int) -> None:
    """Reduce without end; one is killed on the way."""
    if victim == RANK:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        reducer(ranks).start([torch.ones(size)]).wait()


def deserts(ranks: tuple[int, ...], who: int, way: str) -> None:
    """All reduce but one."""
    if who != RANK:
        reducer(ranks).start([torch.ones(1000)]).wait()
    elif way == "raise":
        raise ValueError("no such luck")
    elif way == "leave":
        os._exit(0)
    sys.exit(0)


def abandons(ranks: tuple[int, ...], who: int) -> None:
    """One has started, and ends; so do the others, which never came to it."""
    if who == RANK:
        reducer(ranks).start([torch.ones(3_000_000)])
        time.sleep(0.1)
    sys.exit(0)


def is_late(ranks: tuple[int, ...], who: int, timeout: float) -> None:
    WORLD.watch.timeout = timeout
    if who == RANK:
        time.sleep(100)
    reducer(ranks).start([torch.ones(1000)]).wait()


def breaks(ranks: tuple[int, ...], who: int) -> None:
    """An error in the thread of a reducer."""
    own = reducer(ranks)
    if who == RANK:
        own._near._add = failing  # type: ignore[attr-defined]
    own.start([torch.ones(1000)]).wait()


def failing(*_: object) -> None:
    raise RuntimeError("the disk is full")


def traffic(ranks: tuple[int, ...]) -> tuple[int, int]:
    own = reducer(ranks).traffic
    return own.shared, own.network


def received(interface: str) -> int:
    """Bytes that have come in by the interfaces whose names begin so, as the kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(interface))


def forbid_large_files(who: int) -> None:
    if who == RANK:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def wish(transports: dict[int, str]) -> None:
    os.environ["PENSTOCK_TRANSPORT"] = transports[RANK]


def kept(ranks: tuple[int, ...], count: int) -> dict[str, Any]:
    """Open and close reducers again and again."""
    for _ in range(count):
        one = open_reducer(WORLD, ranks, torch.device("cpu"))
        one.start([torch.ones(10)]).wait()
        one.close()
    return memory()


def main() -> None:
    torch.set_num_threads(1)
    with Client(sys.argv[1], family="AF_UNIX") as pipe:
        pipe.send(RANK)
        while True:
            what, words = pipe.recv()
            if what == "end":
                return
            pipe.send(globals()[what](*words))


if __name__ == "__main__":
    main()
