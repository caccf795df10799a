"""The reducer of tensors in host memory."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.comm.collectives import prepare, rounds
from penstock.comm.collectives.flat import Flat
from penstock.comm.collectives.job import ReductionJob, ReductionKind, Unlike
from penstock.comm.collectives.near import Near
from penstock.comm.collectives.segment import BUCKET
from penstock.comm.collectives.worker import Reduction, Worker
from penstock.errors import PenstockError

Exchange = Callable[[str], list[str]]  # strings of this rank -> those of all ranks of the group, in their order


class HostReducer:
    """A `Reducer` of tensors in host memory."""

    def __init__(self, ranks: tuple[int, ...], near: Near, worker: Worker, exchange: Exchange) -> None:
        """`exchange` is slow, and used only after errors."""
        self.ranks, self.traffic = ranks, near.traffic
        self._near, self._worker, self._exchange = near, worker, exchange
        self._me = ranks.index(worker.rank)
        self._open, self._process = True, os.getpid()
        atexit.register(self.close)

    def start(self, tensors: Sequence[Tensor]) -> Reduction:
        given = list(tensors)
        prepare.require(given)
        prepare.require_addable(given)
        return self._submit(partial(self._reduce, given))

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int]) -> Reduction:
        prepare.require([flat])
        prepare.require_addable([flat])
        prepare.require_bounds(bounds, self.ranks, flat.numel())
        return self._submit(partial(self._scatter, flat, list(bounds)))

    def all_gather(self, part: Tensor, out: Tensor, bounds: Sequence[int]) -> Reduction:
        prepare.require([part, out])
        prepare.require_bounds(bounds, self.ranks, out.numel())
        prepare.require_part(part, out, bounds[self._me], bounds[self._me + 1])
        return self._submit(partial(self._gather, part, out, list(bounds)))

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._open and os.getpid() == self._process:
            self._open = False
            self._worker.stop()
            self._near.close()

    def _submit(self, work: Callable[[], list[Tensor]]) -> Reduction:
        if not self._open or os.getpid() != self._process:
            raise PenstockError("expected an open reducer, but this one was closed, or copied by a fork; open another")
        return self._worker.submit(work)

    # -- in the worker's thread ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, tensors: list[Tensor]) -> list[Tensor]:
        words = ["all-reduce", *prepare.in_words(tensors)]
        sums = prepare.separate(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in sums) or [torch.uint8]:
            flat = Flat([tensor for tensor in sums if tensor.dtype == dtype])
            cut = rounds.even(self._near.group, flat.end, BUCKET // dtype.itemsize)
            self._run(words, ReductionKind.REDUCE, dtype, flat, flat, cut)
        for tensor in sums:
            prepare.mark_written(tensor)
        return sums

    @torch.no_grad()
    def _scatter(self, flat: Tensor, bounds: list[int]) -> list[Tensor]:
        words = [f"reduce-scatter by {bounds}", *prepare.in_words([flat])]
        start, stop = bounds[self._me : self._me + 2]
        part = torch.empty(stop - start, dtype=flat.dtype, device="cpu")
        (dense,) = prepare.separate([flat])
        cut = rounds.by_part(self._near.group, bounds, BUCKET // flat.itemsize)
        self._run(words, ReductionKind.SCATTER, flat.dtype, Flat([dense]), Flat([part], start), cut)
        return [part]

    @torch.no_grad()
    def _gather(self, part: Tensor, out: Tensor, bounds: list[int]) -> list[Tensor]:
        words = [f"all-gather by {bounds}", *prepare.in_words([out])]
        (dense,) = prepare.separate([part])
        source, cut = (
            Flat([dense], bounds[self._me]),
            rounds.by_part(self._near.group, bounds, BUCKET // out.itemsize),
        )
        self._run(words, ReductionKind.GATHER, out.dtype, source, Flat([out]), cut)
        _written(out)
        return [out]

    def _run(
        self,
        words: list[str],
        kind: ReductionKind,
        dtype: torch.dtype,
        source: Flat,
        target: Flat,
        cut: list[rounds.Round],
    ) -> None:
        try:
            self._near.run(ReductionJob(kind, dtype, source, target, cut, prepare.digest(words)))
        except Unlike:
            said = self._exchange(json.dumps(words))
            raise prepare.unlike(dict(zip(self.ranks, map(json.loads, said), strict=True))) from None


def _written(tensor: Tensor) -> None:
    """Notify autograd of a change in place."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
