"""The choices of a search: schedules and what each holds in memory, sizes of micro-batches, orders of devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from math import isqrt
from typing import Any

from penstock.core.cluster import Cluster
from penstock.errors import InputError

MOST_STEPS = 4096  # micro-batches of a batch
ORDERS = 3  # at most, lest a large search do everything several times


@dataclass(frozen=True)
class SearchMethod:
    """One schedule with what the search must know of it."""

    name: str
    schedule: str
    flush: bool = True  # a step ends when all is done; else what counts is the pace
    deep: bool = False  # about twice the micro-batches in flight
    whole: bool = False  # all of a step's micro-batches in flight
    split: bool = False  # weight gradients apart from input gradients, and later
    chunks: int = 1
    folded: bool = False
    turns: bool = False  # replicas take whole mini-batches in turns
    versions: int = 1  # of the weights; 0: as many as micro-batches are in flight
    cap: int = 0  # micro-batches in flight at most, whatever it costs; 0: no such limit
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def slope(self) -> int:
        """Micro-batches in flight for each stage behind, beside the first; 0: all of a step's."""
        return 0 if self.whole else 2 if self.deep else 1


CAPS = (1, 2, 4)
METHODS = (  # with a flush first, since those train as one device does, and the simpler ones of each kind first
    SearchMethod("1f1b", "1f1b"),
    SearchMethod("gpipe", "gpipe", whole=True),
    SearchMethod("zb-h1", "zb-h1", split=True),
    SearchMethod("dapple pb", "dapple", deep=True, options=(("policy", "pb"),)),
    SearchMethod("zb-h2", "zb-h2", deep=True, split=True),
    SearchMethod("interleaved", "interleaved", chunks=2),
    SearchMethod("interleaved 4", "interleaved", chunks=4),
    SearchMethod("zb-v", "zb-v", chunks=2, folded=True),
    *(SearchMethod(f"dapple cap {k}", "dapple", cap=k, options=(("cap", k), ("policy", "pa"))) for k in reversed(CAPS)),
    SearchMethod("2bw", "2bw", flush=False, versions=2),
    SearchMethod("pipedream", "pipedream", flush=False, turns=True, versions=0),
    SearchMethod("pipemare", "pipemare", flush=False, turns=True),
)
GROUPS = ("any", "synchronous", "asynchronous")
_registered: dict[str, SearchMethod] = {}  # schedules of the user's


def register_method(method: SearchMethod) -> None:
    """Add a user's schedule to the search, after those of METHODS."""
    _registered[method.name] = method


def all_methods() -> tuple[SearchMethod, ...]:
    """Return the methods that a search may use, the simpler ones of each kind first."""
    return (*METHODS, *_registered.values())


def _group(name: str) -> tuple[SearchMethod, ...]:
    """Return the methods of a group, a schedule or a single method."""
    if name in GROUPS:
        flush = {"any": (True, False), "synchronous": (True,), "asynchronous": (False,)}[name]
        return tuple(method for method in all_methods() if method.flush in flush)
    return tuple(method for method in all_methods() if name in (method.name, method.schedule))


def chosen_methods(schedules: str | Iterable[str], allow_async: bool = False) -> tuple[SearchMethod, ...]:
    """Return the methods of a group, or those of the schedules named.

    An asynchronous schedule changes what is trained, so it is searched only when asked for: by its name, or by
    `allow_async`, without which "any" is any synchronous one.
    """
    try:
        names = [part.strip() for part in schedules.split(",")] if isinstance(schedules, str) else list(schedules)
    except TypeError:
        raise InputError("schedules as names", repr(schedules), "give some, or one of " + ", ".join(GROUPS)) from None
    if not names:
        raise InputError("at least one schedule to search among", "none", "leave schedules out, or name some")
    chosen: list[SearchMethod] = []
    for name in names:
        if name == "any" and not allow_async:
            name = "synchronous"
        fitting = _group(str(name))
        if not fitting:
            choices = [*GROUPS, *dict.fromkeys(method.schedule for method in all_methods())]
            near = get_close_matches(str(name), choices, n=1)
            advice = f"did you mean {near[0]}? all are" if near else "choose among"
            raise InputError("schedules that search knows", repr(name), f"{advice} {', '.join(choices)}")
        chosen += [method for method in fitting if method not in chosen]
    return tuple(chosen)


def all_multiples(microbatches: int, fixed: bool) -> list[int]:
    """Return all sizes of a micro-batch, in units of the profile's, that make whole micro-batches.

    Those that make more than `MOST_STEPS` are left out if others remain: by then there is no bubble to make smaller.
    """
    if fixed:
        return [1]
    small = [times for times in range(1, isqrt(microbatches) + 1) if microbatches % times == 0]
    every = sorted({*small, *(microbatches // times for times in small)})
    return [times for times in every if microbatches // times <= MOST_STEPS] or every[-1:]


def multiples(microbatches: int, fixed: bool) -> list[int]:
    """Return sizes of a micro-batch in units of the profile's: those that make whole micro-batches, fewer as they grow.

    Never smaller than what was profiled: small ones use a device worse than proportion says.
    """
    kept, last = [], 0.0
    for times in all_multiples(microbatches, fixed):
        if times >= 1.5 * last:  # steps of about two are enough to choose from
            kept.append(times)
            last = times
    return kept


def orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return orders of the devices, in which stages take neighbours: by host, one of each host in turn, fast last."""
    count = len(cluster.devices)
    natural = tuple(range(count))
    size = cluster.levels[0].size if cluster.levels else 1
    scattered = tuple(sorted(natural, key=lambda d: (d % size, d // size)))
    by_speed = tuple(sorted(natural, key=lambda d: (cluster.devices[d].speed, d)))
    by_memory = tuple(sorted(natural, key=lambda d: (-cluster.devices[d].memory, d)))
    return list(dict.fromkeys((natural, by_speed, by_memory, scattered)))[:ORDERS]


def no_order_matters(cluster: Cluster) -> bool:
    """Return whether it makes no difference which devices a stage gets: they are alike, and one level joins them."""
    return len(set(cluster.devices)) == 1 and sum(level.size > 1 for level in cluster.levels) <= 1
