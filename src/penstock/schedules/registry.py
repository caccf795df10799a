"""The methods by name, and the two functions that build them: `schedule` (a list) and `loop` (a run without end)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Unpack

from penstock.core.arguments import named, parameters_of, refuse_unknown
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.core.validation import whole
from penstock.errors import InputError
from penstock.schedules.asynchronous import pipedream, pipemare, two_bw
from penstock.schedules.auto.build import OPTIONS as AUTO_OPTIONS
from penstock.schedules.auto.build import auto
from penstock.schedules.chunked import dualpipe_v, interleaved, zb_v
from penstock.schedules.options import MethodOptions
from penstock.schedules.request import MOST_RANKS, ScheduleRequest
from penstock.schedules.straight import dapple, gpipe, naive, one_f_one_b, zb_h1, zb_h2


@dataclass(frozen=True)
class ScheduleMethod:
    """One named method: its builder, its summary, and the micro-batches, chunks and options it takes."""

    name: str
    build: Callable[[ScheduleRequest], Schedule | Loop]
    summary: str
    rule: str = "any m"
    chunks: tuple[int, int] = (1, 1)  # fewest and most chunks a rank
    usual_chunks: int | None = None  # used when the caller gives none; otherwise the fewest
    asynchronous: bool = False
    microbatches: int | None = None  # used when the caller gives none
    options: dict[str, str] = field(default_factory=dict)

    @property
    def chunks_in_words(self) -> str:
        fewest, most = self.chunks
        return str(fewest) if fewest == most else f"{fewest} or more"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "asynchronous" if self.asynchronous else "synchronous",
            "summary": self.summary,
            "rule": self.rule,
            "chunks": self.chunks_in_words,
            "options": self.options,
        }


MANY = 1 << 16
METHODS: dict[str, ScheduleMethod] = {
    method.name: method
    for method in (
        ScheduleMethod("naive", naive, "one micro-batch at a time through all ranks: the baseline without a pipeline"),
        ScheduleMethod("gpipe", gpipe, "all forwards, then all backwards"),
        ScheduleMethod("1f1b", one_f_one_b, "one forward, one backward: gpipe's time with less memory"),
        ScheduleMethod(
            "dapple",
            dapple,
            "early backward with K_i forwards ahead",
            options={"policy": "'pa' or 'pb' (deeper warm-up for slow transfers)", "cap": "most live micro-batches, D"},
        ),
        ScheduleMethod(
            "interleaved", interleaved, "1f1b with v chunks a rank: bubble / v", "m a multiple of p", (1, MANY), 2
        ),
        ScheduleMethod("zb-h1", zb_h1, "weight gradients run late: a smaller bubble at 1f1b's memory"),
        ScheduleMethod("zb-h2", zb_h2, "weight gradients run later: hardly a bubble at twice the memory"),
        ScheduleMethod("zb-v", zb_v, "two chunks placed as a V: hardly a bubble at 1f1b's memory", chunks=(2, 2)),
        ScheduleMethod(
            "dualpipe-v",
            dualpipe_v,
            "a V placement that pairs forwards with backwards",
            "m at least 2p",
            (2, 2),
            options={"overlap": "True: F&B is one atomic action; False: F, then B"},
        ),
        ScheduleMethod(
            "auto", auto, "searched for the costs and memory at hand", chunks=(1, MANY), options=AUTO_OPTIONS
        ),
        ScheduleMethod(
            "pipedream",
            pipedream,
            "no flush, one update a mini-batch, stashed weights",
            asynchronous=True,
            microbatches=1,
            options={
                "stash": "False: forward and backward both take the newest weights",
                "vertical_sync": "True: all stages use the first stage's version",
            },
        ),
        ScheduleMethod(
            "2bw", two_bw, "no flush, two weight versions, delay exactly one", "m at least p", asynchronous=True
        ),
        ScheduleMethod("pipemare", pipemare, "no flush, one weight copy, corrected for delay", asynchronous=True),
    )
}
BUILT_IN = frozenset(METHODS)


def option_names() -> tuple[str, ...]:
    """Return the names of all options that any method has."""
    return tuple(sorted({option for method in METHODS.values() for option in method.options}))


def register(method: ScheduleMethod) -> None:
    """Add a user's method, or replace one of that name; the built-in ones stay."""
    if method.name in BUILT_IN:
        raise InputError("a name of your own for the schedule", repr(method.name), "choose another name")
    METHODS[method.name] = replace(method, build=partial(_build_checked, method))


def _build_checked(method: ScheduleMethod, request: ScheduleRequest) -> Schedule | Loop:
    """Build by a user's function; raise InputError for a result that does not fit the request."""
    built = method.build(request)
    kind = Loop if method.asynchronous else Schedule
    if not isinstance(built, kind):
        came = f"{type(built).__name__} from {method.name!r}"
        raise InputError(f"a builder that returns a {kind.__name__}", came, "return request.schedule(...), say")
    shape = built.shape
    facts = {"stages": shape.ranks, "microbatches": shape.microbatches, "replicas": shape.replicas}
    asked = {"stages": request.stages, "microbatches": request.microbatches, "replicas": request.replicas}
    if isinstance(built, Schedule):
        facts["batches"], asked["batches"] = shape.batches, request.batches
    for name, value in asked.items():
        if facts[name] != value:
            came = f"{facts[name]} from {method.name!r}"
            raise InputError(f"a schedule of {name} {value}, as the request says", came, "correct the builder")
    return built


@named
def schedule(
    name: str,
    *,
    stages: int,
    microbatches: int | None = None,
    batches: int | None = None,
    chunks: int | None = None,
    replicas: int | Sequence[int] = 1,
    edges: Sequence[tuple[int, int]] = (),
    **options: Unpack[MethodOptions],
) -> Schedule:
    """Return the compute schedule of a named method: `schedule("1f1b", stages=4, microbatches=8)`."""
    refuse_unknown("schedule", options, [*parameters_of(schedule), *option_names()])
    built = _build(name, stages, microbatches, batches, chunks, replicas, edges, dict(options))
    if isinstance(built, Schedule):
        return built
    return built.unroll(batches if batches is not None else _batches_to_see_it_steady(built))


@named
def loop(
    name: str,
    *,
    stages: int,
    microbatches: int | None = None,
    replicas: int | Sequence[int] = 1,
    edges: Sequence[tuple[int, int]] = (),
    **options: Unpack[MethodOptions],
) -> Loop:
    """Return an asynchronous method as fill, body and drain: a run of any length."""
    refuse_unknown("loop", options, [*parameters_of(loop), *option_names()])
    built = _build(name, stages, microbatches, None, None, replicas, edges, dict(options))
    if isinstance(built, Loop):
        return built
    names = ", ".join(method.name for method in METHODS.values() if method.asynchronous)
    raise InputError(f"an asynchronous method ({names})", repr(name), "use schedule() for a synchronous one")


def _build(
    name: str,
    stages: int,
    microbatches: int | None,
    batches: int | None,
    chunks: int | None,
    replicas: int | Sequence[int],
    edges: Sequence[tuple[int, int]],
    options: dict[str, Any],
) -> Schedule | Loop:
    method = find(name)
    whole("stages", stages, most=MOST_RANKS)
    if microbatches is None:
        microbatches = method.microbatches
    if microbatches is None:
        raise InputError(f"a number of micro-batches for {name}", "none", "give microbatches")
    unknown = sorted(set(options) - set(method.options))
    if unknown:
        options_of = ", ".join(sorted(method.options)) or "none"
        raise InputError(f"options that {name} has ({options_of})", ", ".join(unknown), "leave the others out")
    request = ScheduleRequest(
        name,
        stages,
        microbatches,
        1 if batches is None else batches,
        _chunks(method, chunks),
        edges=tuple(edges),
        options=options,
        any_chunks=chunks is None,
    )
    if isinstance(replicas, (list, tuple)):
        if not replicas:
            raise InputError(f"a positive replica count for each of {stages} ranks", "[]", "give one number a rank")
        counts = tuple(whole("replicas", count) for count in replicas)
    else:
        counts = (whole("replicas", replicas),) * stages
    return method.build(replace(request, replicas=counts))


def find(name: str) -> ScheduleMethod:
    """Return the method of that name; refuse a wrong one and name the nearest right ones."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    near = get_close_matches(str(name), METHODS, n=2)
    advice = f"try {' or '.join(near)}; all are" if near else "choose one of"
    came = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
    raise InputError("the name of a method", came, f"{advice} {', '.join(METHODS)}")


def _chunks(method: ScheduleMethod, given: int | None) -> int:
    fewest, most = method.chunks
    chunks = whole("chunks", given, least=0) if given is not None else method.usual_chunks or fewest
    if not fewest <= chunks <= most:
        rule = f"exactly {fewest}" if fewest == most else f"{fewest} to {most}"
        raise InputError(f"{rule} chunk(s) a rank for {method.name}", chunks, "change chunks or the method")
    return chunks


def _batches_to_see_it_steady(endless: Loop) -> int:
    """Return enough mini-batches for every rank to pass through its warm-up and some of the steady state."""
    shape = endless.shape
    ahead = max(int(rows.microbatch.max(initial=0)) for rows in endless.body) // shape.microbatches
    return 2 * (ahead + endless.period)
