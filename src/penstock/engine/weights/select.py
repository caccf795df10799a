"""The selection of the weights that an action sees, in training without a flush.

A forward runs on the version that the schedule names, and its backward, late weight gradients included, on the same
version; or, under the law NEWEST, each action runs on the newest version. A weight that several stages share has one
owner. For a micro-batch, every stage uses the version that the owner's forward used; the copies follow version by
version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

from penstock.core.action import Op
from penstock.core.lowered_loop import FOREVER, LoweredLoop
from penstock.core.shape import Law
from penstock.engine.observer import Observers
from penstock.engine.weights.forecast import Drift, Steps
from penstock.engine.weights.ties import TiedWeights, TieGroup
from penstock.engine.weights.versions import Key, Versions

_NOTHING = nullcontext()

# Returns the steps that a stage's optimizer would take next, one for each of the weights.
Foreseen = Callable[[int, list[nn.Parameter]], list[Tensor]]


class CurrentWeights:
    """The only version in synchronous training; `fetch(stage)` moves a stage's weights to where they are needed
    next."""

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self.fetch = fetch

    def at(self, op: Op, stage: int, microbatch: int, version: int, replica: int = 0) -> AbstractContextManager[None]:
        """Return a context in which the stage's weights are on its device."""
        self.fetch(stage)
        return _NOTHING

    def ready(self, stage: int) -> None:
        """Move a stage's weights to its device."""
        self.fetch(stage)


@dataclass(frozen=True)
class Mitigation:
    """Staleness mitigation. `decay` is PipeMare's D (None: backward weights are not corrected). `ahead`:
    forwards run on forecast weights. `foreseen` returns the steps of a forecast (None: the last step taken)."""

    decay: float | None = None
    ahead: bool = False
    foreseen: Foreseen | None = None


@dataclass(eq=False)
class Held:
    """Weights that one stage uses: its own, or those of a group that it shares."""

    stage: int
    owner: int
    versions: Versions
    group: TieGroup | None = None
    far: bool = False  # a copy of weights whose owner lives in another process
    seen: int = 0  # the newest version that this stage has used
    drift: Drift | None = None
    steps: Steps | None = None


@dataclass(eq=False)
class VersionedWeights:
    """The weights of the stages of one process. `own` are each stage's weights without shared ones.

    Replicas of a stage in one process share its versions: each names those that it has come to. `replicas`: those of
    every stage here, where that is not the first alone.
    """

    endless: LoweredLoop
    own: dict[int, list[nn.Parameter]]
    ties: TiedWeights
    mitigation: Mitigation = field(default_factory=Mitigation)
    observers: Observers = field(default_factory=Observers)
    replicas: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shared = {group.number: Versions(group.parameters) for group in self.ties.groups}
        self.held: dict[int, list[Held]] = {}
        for stage, parameters in self.own.items():
            held_of_stage = [Held(stage, stage, Versions(parameters))]
            for group in self.ties.groups:
                if stage in group.stages:
                    far = group.owner not in self.own
                    held_of_stage.append(Held(stage, group.owner, shared[group.number], group, far))
            self.held[stage] = held_of_stage
        self.users: dict[Versions, list[Held]] = {}
        for held in self.every():
            self.users.setdefault(held.versions, []).append(held)
        self.newest = self.endless.shape.law is Law.NEWEST
        self._watch_drift()
        self.begin()

    def begin(self) -> None:
        """Begin a new run: the newest version becomes version 0."""
        places = [(stage, replica) for stage in self.own for replica in self._replicas_here(stage)]
        first = self.endless.first_microbatch
        self.next = {place: first(*place) for place in places}  # micro-batch of each replica's next forward
        self.total: int | None = None  # micro-batches in all, once known
        self.live: dict[tuple[int, int, int], list[Key]] = {}  # by stage, replica and micro-batch
        self.level = False  # whether the mini-batch runs alone: its backward has the weights of its forward
        for held in self.every():
            held.seen = 0
            held.versions.restart()
            if held.steps is not None:
                held.steps.restart()
            if held.drift is not None:
                held.drift.forget()

    def end(self) -> None:
        """End a run after the drain: copies take up the last versions."""
        for held in self.every():
            if held.owner != held.stage:
                self._bring(held, -(-(self.total or 0) // self.endless.shape.microbatches))
            held.versions.show_newest()

    @contextmanager
    def at(self, op: Op, stage: int, microbatch: int, version: int, replica: int = 0) -> Iterator[None]:
        """Set `.data` of the stage's weights to the version that the action sees, within the context."""
        if op in (Op.F, Op.FB):
            keys = [self._ahead(held, microbatch, self._named(held, microbatch, version)) for held in self.held[stage]]
            self._show(stage, keys)
            self.next[stage, replica] = self.endless.next_microbatch(stage, microbatch)
            yield
            if not self.newest:
                self._hold((stage, replica, microbatch), keys)
        elif self.newest:
            self._show(stage, [self._current(held) for held in self.held[stage]])
            with self._corrected(stage):
                yield
        else:
            self._show(stage, self.live[stage, replica, microbatch])
            yield
            if op is not Op.I:
                self._release((stage, replica, microbatch))

    def ready(self, stage: int) -> None:
        """Do nothing: outside of a run the newest weights are in place."""

    @contextmanager
    def updating(self, stage: int) -> Iterator[None]:
        """Create a new version of the weights that a stage owns, which the optimizer changes within the context."""
        for notify in self.observers.update_begins:
            notify(stage)
        owned = [held for held in self.held[stage] if held.owner == stage]
        for held in owned:
            held.versions.show_newest()
            self._before_update(held, held.versions.data[held.versions.shown])
            held.versions.advance(self._oldest(held))
        with _unsafe_preserve_version_counter(tuple(p for held in owned for p in held.versions.parameters)):
            yield
        for held in owned:
            held.versions.copy_replaced()
            self._after_update(held, held.versions.data[held.versions.shown])
            held.seen = held.versions.newest
            if held.group is not None:
                self.ties.send_weights(held.group)
        for notify in self.observers.update_ends:
            notify(stage)

    @property
    def bytes(self) -> dict[int, int]:
        """Bytes of all versions, by the stage that owns them or has a copy."""
        total = dict.fromkeys(self.own, 0)
        for versions, stage in {held.versions: held.stage for held in reversed(list(self.every()))}.items():
            total[stage] += versions.bytes
        return total

    def _named(self, held: Held, microbatch: int, version: int) -> int:
        """Return the version of these weights that a forward sees; update a copy up to it."""
        if held.owner == held.stage:
            return version
        target = self.endless.named(held.owner, microbatch)
        self._bring(held, target)
        return target

    def _bring(self, held: Held, target: int) -> None:
        """Update a copy, version by version."""
        if held.far:
            self._follow(held, target)
        elif held.drift is not None or held.steps is not None:
            for version in range(held.seen + 1, target + 1):
                self._before_update(held, held.versions.data[Key(version - 1)])
                self._after_update(held, held.versions.data[Key(version)], version)
        held.seen = max(held.seen, target)

    def _current(self, held: Held) -> Key:
        """Return the newest version for a stage; for a copy, the one that its last forward used."""
        return Key(held.versions.newest if held.owner == held.stage else held.seen)

    def _ahead(self, held: Held, microbatch: int, version: int) -> Key:
        """Return the version itself, or a forecast of the version to which the gradient will be applied."""
        gap = microbatch // self.endless.shape.microbatches - version
        key = Key(version, gap if self.mitigation.ahead else 0)
        if key.ahead and held.steps is not None:
            steps = held.steps.of(version)
            if steps is None:
                return Key(version)
            held.versions.forecast(key, steps)
        return key

    def _show(self, stage: int, keys: list[Key]) -> None:
        for held, key in zip(self.held[stage], keys, strict=True):
            held.versions.show(key)

    def _hold(self, place: tuple[int, int, int], keys: list[Key]) -> None:
        for held, key in zip(self.held[place[0]], keys, strict=True):
            held.versions.hold(key)
        self.live[place] = keys

    def _release(self, place: tuple[int, int, int]) -> None:
        for held, key in zip(self.held[place[0]], self.live.pop(place), strict=True):
            held.versions.release(key)
            held.versions.trim(self._oldest(held))

    def _oldest(self, held: Held) -> int:
        """Return the oldest version that a stage of this process will still use."""
        return min(self._oldest_of(user) for user in self.users[held.versions])

    def _oldest_of(self, held: Held) -> int:
        coming = [self.next[held.stage, replica] for replica in self._replicas_here(held.stage)]
        total = FOREVER if self.total is None else self.total
        named = min((self.endless.named(held.owner, one) for one in coming if one < total), default=FOREVER)
        looks_back = self.newest or held.steps is not None  # a copy's newest version, or the one before its step
        return min(named, held.seen) if looks_back and held.owner != held.stage and not held.far else named

    @contextmanager
    def _corrected(self, stage: int) -> Iterator[None]:
        """Show PipeMare's T2 backward weights w - tau * delta."""
        corrected = [held for held in self.held[stage] if held.drift is not None and not self.level]
        for held in corrected:
            assert held.drift is not None
            held.versions.show_these(held.drift.corrected(held.versions.data[held.versions.shown]))
        try:
            yield
        finally:
            for held in corrected:
                held.versions.show_these(held.versions.data[held.versions.shown])

    def _follow(self, held: Held, version: int) -> None:
        """Receive the versions of a copy that the owner has sent, up to `version`."""
        assert held.group is not None
        while held.versions.newest < version:
            held.versions.show_newest()
            self._before_update(held, held.versions.data[held.versions.shown])
            held.versions.advance(FOREVER if self.newest else self._oldest(held))
            after = held.versions.data[held.versions.shown]
            torch._foreach_copy_(after, self.ties.receive_weights(held.group, held.stage))
            self._after_update(held, after)

    def _before_update(self, held: Held, before: list[Tensor]) -> None:
        if held.drift is not None:
            held.drift.before_update(before)
        if held.steps is not None and self.mitigation.foreseen is None:
            held.steps.before_update(before)

    def _after_update(self, held: Held, after: list[Tensor], version: int | None = None) -> None:
        version = held.versions.newest if version is None else version
        if held.drift is not None:
            held.drift.after_update(after)
        if held.steps is None:
            return
        if self.mitigation.foreseen is None:
            held.steps.after_update(after, version)
        else:
            held.steps.set_steps(self.mitigation.foreseen(held.owner, held.versions.parameters), version)
        held.steps.trim(self._oldest_of(held))

    def _replicas_here(self, stage: int) -> tuple[int, ...]:
        return self.replicas.get(stage, (0,))

    def _watch_drift(self) -> None:
        for held in self.every():
            between = self.endless.delay(held.stage) - self.endless.delay(held.stage, Op.B)
            if self.mitigation.decay is not None and between > 0:
                held.drift = Drift(held.versions.parameters, between, self.mitigation.decay)
            if self.mitigation.ahead:
                held.steps = Steps(held.versions.parameters)

    def every(self) -> Iterable[Held]:
        """Return all weights of this process, once for each stage that uses them."""
        return (held for stage in self.held.values() for held in stage)
