"""The reducer of ranks that have a GPU each, over NCCL, which adds in an order of its own.

A thread starts what NCCL does on a stream of its own, behind the kernels that the tensors wait for, and waits for it on
the host, where it learns of the death of other ranks. Parts of unequal size are padded to the longest.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.comm.collectives import prepare
from penstock.comm.collectives.interface import ReceivedBytes
from penstock.comm.collectives.worker import Reduction, Worker
from penstock.errors import PenstockError

PATIENCE = timedelta(days=1)  # NCCL's own time-out ends processes without a word; the watch of ranks is there first
NAP = 100e-6  # seconds between two looks at the GPU


class NcclReducer:
    """This rank's part in the reductions of a group: a `Reducer`."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        store: Store,
        worker: Worker,
        exchange: Callable[[str], list[str]],
    ) -> None:
        self.ranks, self.traffic, self._worker, self._exchange = ranks, ReceivedBytes(), worker, exchange
        self._me, self._device = ranks.index(worker.rank), device
        self._others = tuple(rank for rank in ranks if rank != worker.rank)
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        self._group: Any = dist.ProcessGroupNCCL(store, self._me, len(ranks), options)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._open, self._process = True, os.getpid()
        atexit.register(self.close)

    def start(self, tensors: Sequence[Tensor]) -> Reduction:
        given = list(tensors)
        prepare.require(given, "cuda")
        prepare.require_addable(given)
        return self._submit(["all-reduce", *prepare.in_words(given)], partial(self._reduce, given))

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int]) -> Reduction:
        prepare.require([flat], "cuda")
        prepare.require_addable([flat])
        prepare.require_bounds(bounds, self.ranks, flat.numel())
        words = [f"reduce-scatter by {list(bounds)}", *prepare.in_words([flat])]
        return self._submit(words, partial(self._scatter, flat, list(bounds)))

    def all_gather(self, part: Tensor, out: Tensor, bounds: Sequence[int]) -> Reduction:
        prepare.require([part, out], "cuda")
        prepare.require_bounds(bounds, self.ranks, out.numel())
        prepare.require_part(part, out, bounds[self._me], bounds[self._me + 1])
        words = [f"all-gather by {list(bounds)}", *prepare.in_words([out])]
        return self._submit(words, partial(self._gather, part, out, list(bounds)))

    def close(self) -> None:
        """The communicator ends with the process."""
        atexit.unregister(self.close)
        if self._open and os.getpid() == self._process:
            self._open = False
            self._worker.stop()

    def _submit(self, words: list[str], work: Callable[[], list[Tensor]]) -> Reduction:
        if not self._open or os.getpid() != self._process:
            raise PenstockError("expected an open reducer, but this one was closed, or copied by a fork; open another")
        made = torch.cuda.current_stream(self._device).record_event()
        return self._worker.submit(partial(self._run, words, work, made))

    # -- in the worker's thread ---------------------------------------------------------------------------------------

    def _run(self, words: list[str], work: Callable[[], list[Tensor]], made: torch.cuda.Event) -> list[Tensor]:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            self._agree(words)
            results = work()
            self._finish()
        return results

    def _agree(self, words: list[str]) -> None:
        own = torch.frombuffer(bytearray(prepare.digest(words)), dtype=torch.uint8).to(self._device)
        every = own.new_empty(len(self.ranks) * len(own))
        self._group._allgather_base(every, own).wait()
        self._finish()
        if not bool((every.view(len(self.ranks), -1) == own).all()):
            said = self._exchange(json.dumps(words))
            raise prepare.unlike(dict(zip(self.ranks, map(json.loads, said), strict=True)))

    def _reduce(self, tensors: list[Tensor]) -> list[Tensor]:
        sums = prepare.separate(tensors)
        for tensor in sums:
            if tensor.numel():
                self._group.allreduce([tensor]).wait()
                prepare.mark_written(tensor)
        return sums

    def _scatter(self, flat: Tensor, bounds: list[int]) -> list[Tensor]:
        padded = flat.new_zeros(len(self.ranks), _longest(bounds))
        for row, (start, stop) in zip(padded, pairwise(bounds), strict=True):
            row[: stop - start] = flat.reshape(-1)[start:stop]
        part = padded.new_empty(padded.shape[1])
        if len(part):
            self._group._reduce_scatter_base(part, padded.view(-1)).wait()
        return [part[: bounds[self._me + 1] - bounds[self._me]].clone()]

    def _gather(self, part: Tensor, out: Tensor, bounds: list[int]) -> list[Tensor]:
        own = part.new_zeros(_longest(bounds))
        own[: part.numel()] = part.reshape(-1)
        padded = own.new_empty(len(self.ranks), len(own))
        if len(own):
            self._group._allgather_base(padded.view(-1), own).wait()
        for row, (start, stop) in zip(padded, pairwise(bounds), strict=True):
            out[start:stop] = row[: stop - start]
        return [out]

    def _finish(self) -> None:
        """Wait until the GPU has done all of it."""
        done = self._stream.record_event()

        def over(seconds: float) -> bool:
            until = monotonic() + seconds
            while not done.query() and monotonic() < until:
                sleep(NAP)
            return bool(done.query())

        self._worker.wait(self._others, over)


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))
