"""Reductions between hosts: the first rank of each host exchanges buckets with those of the others, over gloo.

    scatter   each host receives its region from all others, and adds it up in the order of the hosts
    gather    each host receives the other regions

So each host receives (h - 1) / h of a bucket of an all-reduce twice, with h hosts.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.comm.collectives.flat import add_up, copy
from penstock.comm.collectives.interface import ReceivedBytes
from penstock.comm.collectives.segment import BUCKET
from penstock.comm.collectives.worker import Worker

FOREVER = timedelta(days=1)  # the watch of ranks reports failures before
NOTHING = 7  # a tag that is never sent with


class Far:
    """The exchange of this rank, the first of its host. `leaders`: the first ranks of all hosts, in their order."""

    def __init__(self, leaders: tuple[int, ...], store: Store, worker: Worker, traffic: ReceivedBytes) -> None:
        """Wait for the others to connect."""
        self.worker, self.traffic = worker, traffic
        self.me = leaders.index(worker.rank)
        self.peers = tuple(rank for rank in leaders if rank != worker.rank)
        self._count = len(leaders)
        self._group: Any = dist.ProcessGroupGloo(
            store, self.me, self._count, FOREVER
        )  # its methods are untyped in torch
        # kept forever: a gloo thread that releases the last reference to a tensor needs the interpreter's lock
        room = BUCKET * self._count
        self._out, self._in = (torch.empty(room, dtype=torch.uint8, device="cpu") for _ in range(2))
        self._under_way: dist.Work | None = None

    def agree(self, digest: bytes) -> bool:
        """Whether all hosts have started the same reduction."""
        size = len(digest)
        self._out[: size * self._count] = torch.frombuffer(bytearray(digest * self._count), dtype=torch.uint8)
        self._exchange([size] * self._count, [size] * self._count)
        return self._in[: size * self._count].numpy().tobytes() == digest * self._count

    def scatter(self, bucket: Tensor, regions: tuple[int, ...]) -> None:
        """Sum this host's region of the bucket over all hosts."""
        start, stop = regions[self.me : self.me + 2]
        size = (stop - start) * bucket.itemsize
        copy(self._out.data_ptr(), bucket.data_ptr(), bucket.nbytes)
        self._exchange(_bytes(bucket, regions), [size] * self._count)
        if size:
            add_up(torch.split(self._in[: size * self._count].view(bucket.dtype), stop - start), bucket[start:stop])
        self.traffic.network += size * len(self.peers)

    def gather(self, bucket: Tensor, regions: tuple[int, ...]) -> None:
        """Fill the bucket with the region of each host."""
        start, stop = regions[self.me : self.me + 2]
        sizes, own = _bytes(bucket, regions), bucket[start:stop]
        sizes[self.me] = 0
        give = [own.nbytes] * self._count
        give[self.me] = 0
        for at in range(len(self.peers)):
            copy(self._out.data_ptr() + at * own.nbytes, own.data_ptr(), own.nbytes)
        self._exchange(give, sizes)
        came = self._in.data_ptr()
        for first, size in zip(regions, sizes, strict=False):
            copy(bucket[first:].data_ptr(), came, size)
            came += size
        self.traffic.network += sum(sizes)

    def close(self) -> None:
        """Break the connections where an exchange is under way, so that gloo's threads return."""
        if self._under_way is not None:
            nowhere = torch.empty(1, dtype=torch.uint8, device="cpu")
            for at in range(self._count):
                if at != self.me:
                    with suppress(RuntimeError):
                        self._group.recv([nowhere], at, NOTHING).wait(timedelta(milliseconds=1))
        del self._group

    def _exchange(self, give: list[int], get: list[int]) -> None:
        """Exchange bytes with each host."""
        given, got = self._out[: sum(give)], self._in[: sum(get)]
        work = self._group.alltoall_base(got, given, get, give, dist.AllToAllOptions())
        self._under_way = work

        def over(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if work.is_completed() and "Operation timed out" not in str(error):
                    raise self.worker.watch.lost(self.peers[0], error) from None
                return False
            return True

        self.worker.wait(self.peers, over)
        self._under_way = None


def _bytes(bucket: Tensor, regions: tuple[int, ...]) -> list[int]:
    return [(stop - start) * bucket.itemsize for start, stop in pairwise(regions)]
