"""The choice of cuts: before calls of submodules, between whole blocks, balanced by counted operations, with few bytes
sent."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Any

from torch import nn

from penstock.errors import SplitError
from penstock.model.allowed import refusal
from penstock.model.hooks import hooks_of
from penstock.model.record import trace
from penstock.model.trace import Event, Trace
from penstock.model.walk import Layout
from penstock.model.whole_parts import whole_parts

TRIES = 8  # traces of a model that drops layers
SLACK = 1.02  # a partition this close to the best balance may be taken for fewer bytes
_REENTRANT = "torch.utils.checkpoint.CheckpointFunction.apply"
CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)  # torch's own that may be opened


def open_for(model: nn.Module, cuts: list[str]) -> frozenset[str]:
    """Return the modules whose own code every stage runs, for cuts at the modules named."""
    known = dict(model.named_modules(remove_duplicate=False))
    for name in cuts:
        if name not in known or not name:
            near = get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "name submodules as named_modules() does"
            raise SplitError("cuts to name submodules of the model", repr(name), hint)
        for inner in cuts:
            if inner.startswith(f"{name}."):
                raise SplitError(
                    "cuts at modules that stay whole",
                    f"{name!r}, through which another cut goes ({inner!r})",
                    f"name the first module that {name!r} calls in its place",
                )
    opened = {name.rsplit(".", depth)[0] for name in cuts for depth in range(1, name.count(".") + 1)}
    return frozenset({"", *opened})


def open_enough(model: nn.Module, pieces: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Layout, Trace]:
    """Open modules from the root down until there are enough blocks to balance; the blocks stay whole."""
    opened = frozenset({""})
    closed: frozenset[str] = frozenset()  # modules whose code several stages cannot run
    layout = Layout(model, opened)
    seen = fullest_trace(layout, args, kwargs)
    while True:
        further = _to_open(model, seen, pieces, closed)
        if not further:
            return layout, seen
        try:
            wider = Layout(model, opened | further)
            seen, layout, opened = fullest_trace(wider, args, kwargs), wider, opened | further
        except SplitError:
            guilty = frozenset(name for name in further if not _opens(model, opened | {name}, args, kwargs))
            closed |= guilty or further


def fullest_trace(layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Return the trace of an example; for a model that drops layers at random, the longest of several."""
    seen = trace(layout, args, kwargs)
    chances = range(1, TRIES) if seen.may_drop else ()
    return max((seen, *(trace(layout, args, kwargs, chance) for chance in chances)), key=lambda one: len(one.events))


def _opens(model: nn.Module, opened: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        trace(Layout(model, opened), args, kwargs)
    except SplitError:
        return False
    return True


def _to_open(model: nn.Module, seen: Trace, pieces: int, closed: frozenset[str]) -> frozenset[str]:
    load = weights(model, seen)
    atoms = [(event, weight) for event, weight in zip(seen.events, load, strict=True) if is_part(event)]
    total = sum(load) or 1.0
    kinds = [type(model.get_submodule(event.name)) for event, _ in atoms]
    names = [event.name for event, _ in atoms]
    may = [
        (event.name, kind, weight)
        for (event, weight), kind in zip(atoms, kinds, strict=True)
        if event.name not in closed and names.count(event.name) == 1 and openable(model.get_submodule(event.name))
    ]
    heavy = [name for name, kind, weight in may if kinds.count(kind) == 1 and weight > total / pieces / 2]
    if heavy:
        return frozenset(heavy)
    weighty = sum(weight > total / pieces / 20 for _, weight in atoms)
    if weighty >= pieces or not may:
        return frozenset()
    most = max(weight for _, _, weight in may)
    return frozenset(name for name, _, weight in may if weight >= most / 2)


def is_part(event: Event) -> bool:
    return event.atom and not event.name.startswith("(")


def openable(module: nn.Module) -> bool:
    """Whether a module's forward can be opened: it calls submodules, and is not one of torch's own layers."""
    torchs = type(module).__module__.startswith(("torch.nn.modules", "torch._dynamo", "torch.jit", "torch.nn.utils"))
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    whole = compiled or (torchs and not isinstance(module, CONTAINERS))
    return not whole and not hooks_of(module) and any(True for _ in module.children())


def weights(model: nn.Module, seen: Trace) -> list[float]:
    """Return the load of every event: its counted operations (or two for each parameter), and one for each byte of its
    result."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}

    def weigh(event: Event) -> float:
        if event.free:
            return 0.0
        size = sum(sizes[name] for name in event.parameters) if event.atom else 0
        return (event.flops or 2.0 * size) + sum(seen.values[v].bytes for v in event.makes)

    return [weigh(event) for event in seen.events]


def balanced(model: nn.Module, seen: Trace, pieces: int, avoid: frozenset[int] = frozenset()) -> list[tuple[str, int]]:
    """Return the cuts that minimize the load of the heaviest stage and, within SLACK, the bytes sent."""
    load = weights(model, seen)
    begin = next((at + 1 for at, event in enumerate(seen.events) if event.atom and load[at]), len(load))
    parts = [at for at, event in enumerate(seen.events) if is_part(event) and at >= begin]
    candidates = [at for at in parts if seen.events[at].key not in avoid]
    reasons = [(at, refusal(seen, at)) for at in candidates]
    places = [at for at, reason in reasons if reason is None]
    if len(places) < pieces - 1:
        for _, reason in reasons:
            if reason is not None and len(candidates) >= pieces - 1:
                raise reason
        _refuse_reentrant(seen)
        first = next((str(reason.came) for _, reason in reasons if reason is not None), None)
        refused = "" if first is None else f"; and nowhere across {first}"
        raise SplitError(
            f"at most {len(places) + 1} stage{'s' if places else ''} for this model's layers",
            f"{pieces}: {whole_parts(model, seen, load, hooks_of)}{refused}",
            "use fewer stages or chunks",
        )
    chosen = _partition(places, load, crossing_bytes(seen), pieces)
    calls: dict[str, int] = {}
    named = []
    for at, event in enumerate(seen.events):
        if at in chosen:
            named.append((event.name, calls.get(event.name, 0)))
        if event.atom:
            calls[event.name] = calls.get(event.name, 0) + 1
    return named


def _refuse_reentrant(seen: Trace) -> None:
    """Raise for a reentrant checkpoint, which calls its blocks inside an autograd Function, where they are not
    observed."""
    for event in seen.events:
        if event.name == _REENTRANT:
            raise SplitError(
                "enough blocks that can be seen to be called",
                f"some inside a checkpoint with use_reentrant=True at {event.line}",
                "give use_reentrant=False there",
            )


def _partition(places: list[int], load: list[float], crossing: list[int], pieces: int) -> set[int]:
    sums = [0.0]
    for weight in load:
        sums.append(sums[-1] + weight)

    def between(a: int, b: int) -> float:
        return sums[b] - sums[a]

    @cache
    def lightest(begin: int, left: int) -> float:
        if left == 1:
            return between(begin, len(load))
        later = [p for p in places if p > begin]
        return min(
            (max(between(begin, p), lightest(p, left - 1)) for p in later[: len(later) - left + 2]),
            default=float("inf"),
        )

    limit = lightest(0, pieces) * SLACK

    @cache
    def fewest(begin: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return (0.0, ()) if between(begin, len(load)) <= limit else (float("inf"), ())
        best: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for place in places:
            if place <= begin or between(begin, place) > limit:
                continue
            rest = fewest(place, left - 1)
            best = min(best, (crossing[place] + rest[0], (place, *rest[1])))
        return best

    return set(fewest(0, pieces)[1])


def crossing_bytes(seen: Trace) -> list[int]:
    """Return the bytes that a cut before each event would send."""
    sent = [0] * (len(seen.events) + 1)
    for value in seen.values:
        if value.made_by >= 0 and not value.free:
            for at in range(value.made_by + 1, max(value.read_by, default=-1) + 1):
                sent[at] += value.bytes
    return sent
