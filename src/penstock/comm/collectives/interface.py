"""The interface of reductions: the ranks of a group sum their tensors, each rank starting the same reductions in order.

    pending = reducer.start(gradients)   # does not wait for the others
    ...                                  # compute
    sums = pending.wait()

Ranks are added in the order of their numbers, ((r0 + r1) + r2) + ..., in the tensors' own dtype, so the bits depend
neither on who comes first nor on the sizes of pieces. On several hosts the ranks of each host are added so, and then
the hosts, in the order of their lowest ranks. NCCL keeps an order of its own.

Until `wait` returns, the tensors belong to the reducer. Contiguous ones are summed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class ReceivedBytes:
    """Bytes of tensors that this rank has received from others of its group since the reducer was opened.

    `shared`: read from the memory of ranks of this host; `network`: from other hosts. NCCL's are not counted.
    """

    shared: int = 0
    network: int = 0


class Pending(Protocol):
    """A started reduction. `ended`: when it was over, by `perf_counter_ns`; set after `wait`."""

    ended: int

    def wait(self) -> list[Tensor]:
        """Return the results. Raises if another rank has failed, or the ranks gave different tensors."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""


class Reducer(Protocol):
    """One rank's access to the reductions of a group; for one thread.

    Every rank of the group has to start the same ones in the same order, with tensors of equal number, shapes and
    dtypes; otherwise all ranks raise. Tensors are dense; sparse ones are refused.
    """

    ranks: tuple[int, ...]  # ranks of the world, ascending, this rank included
    traffic: ReceivedBytes

    def start(self, tensors: Sequence[Tensor]) -> Pending:
        """Start an all-reduce, which returns the sum of each tensor. A contiguous tensor is summed in place and
        returned."""

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int]) -> Pending:
        """Start a reduce-scatter, which returns this rank's part of the sum in a list of one new tensor; `flat` keeps
        its values.

        `bounds`: where the parts begin, in elements, one for each rank of the group, and the end of the last; parts may
        be unequal or empty.
        """

    def all_gather(self, part: Tensor, out: Tensor, bounds: Sequence[int]) -> Pending:
        """Start an all-gather, which returns `out`, with each rank's part between its bounds, in a list. `part` may be
        a view of `out`."""

    def close(self) -> None:
        """End this rank's reductions; those that were started and not waited for are cancelled."""
