"""Which weights an action sees, in training without a flush.

A forward runs on the version that the schedule names, and its backward, weight gradients that run late included, on
the same; or, where the law says so, each runs on what is newest. A weight that several stages share has one owner, and
for a micro-batch every stage uses the version that the owner's forward of it named: the copy follows by version.
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

# The steps that a stage's optimizer would take next, one for each of some weights.
Foreseen = Callable[[int, list[nn.Parameter]], list[Tensor]]


class CurrentWeights:
    """The one version of synchronous training; `fetch(stage)` has a stage's weights where they are needed next."""

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self.fetch = fetch

    def at(self, op: Op, stage: int, microbatch: int, version: int) -> AbstractContextManager[None]:
        """Return a context in which the stage's weights are on its device."""
        self.fetch(stage)
        return _NOTHING

    def ready(self, stage: int) -> None:
        """Have a stage's weights on its device."""
        self.fetch(stage)


@dataclass(frozen=True)
class Remedy:
    """What is done against stale weights. `decay` is PipeMare's D (None: backward weights are not corrected); `ahead`
    says that forwards run on forecast weights, and `foreseen` from which steps: None, from the last one taken."""

    decay: float | None = None
    ahead: bool = False
    foreseen: Foreseen | None = None


@dataclass(eq=False)
class Held:
    """Weights that one stage uses: its own, or of a group that it shares."""

    stage: int
    owner: int
    versions: Versions
    group: TieGroup | None = None
    far: bool = False  # a copy of weights whose owner lives in another process
    seen: int = 0  # the newest version that this stage has run on
    drift: Drift | None = None
    steps: Steps | None = None


@dataclass(eq=False)
class VersionedWeights:
    """The weights of the stages of one process. `own` are each stage's, without those that it shares."""

    endless: LoweredLoop
    own: dict[int, list[nn.Parameter]]
    ties: TiedWeights
    remedy: Remedy = field(default_factory=Remedy)
    observers: Observers = field(default_factory=Observers)

    def __post_init__(self) -> None:
        shared = {group.number: Versions(group.parameters) for group in self.ties.groups}
        self.held: dict[int, list[Held]] = {}
        for stage, parameters in self.own.items():
            mine = [Held(stage, stage, Versions(parameters))]
            for group in self.ties.groups:
                if stage in group.stages:
                    far = group.owner not in self.own
                    mine.append(Held(stage, group.owner, shared[group.number], group, far))
            self.held[stage] = mine
        self.users: dict[Versions, list[Held]] = {}
        for held in self.every():
            self.users.setdefault(held.versions, []).append(held)
        self.newest = self.endless.shape.law is Law.NEWEST
        self._watch_drift()
        self.begin()

    def begin(self) -> None:
        """A new run: what is newest is version 0."""
        self.next = dict.fromkeys(self.own, 0)  # the micro-batch that each stage runs forward next
        self.total: int | None = None  # micro-batches in all, as soon as that is known
        self.live: dict[tuple[int, int], list[Key]] = {}
        self.level = False  # a mini-batch by itself: its backward finds the very weights of its forward
        for held in self.every():
            held.seen = 0
            held.versions.restart()
            if held.steps is not None:
                held.steps.restart()
            if held.drift is not None:
                held.drift.forget()

    def end(self) -> None:
        """All is drained: copies take up what is left to be heard."""
        for held in self.every():
            if held.owner != held.stage:
                self._bring(held, -(-(self.total or 0) // self.endless.shape.microbatches))
            held.versions.show_newest()

    @contextmanager
    def at(self, op: Op, stage: int, microbatch: int, version: int) -> Iterator[None]:
        """Around an action: `.data` of what the stage uses is what the action shall see."""
        if op in (Op.F, Op.FB):
            keys = [self._ahead(held, microbatch, self._named(held, microbatch, version)) for held in self.held[stage]]
            self._show(stage, keys)
            self.next[stage] = microbatch + 1
            yield
            if not self.newest:
                self._hold(stage, microbatch, keys)
        elif self.newest:
            self._show(stage, [self._current(held) for held in self.held[stage]])
            with self._corrected(stage):
                yield
        else:
            self._show(stage, self.live[stage, microbatch])
            yield
            if op is not Op.I:
                self._release(stage, microbatch)

    def ready(self, stage: int) -> None:
        """Outside of a run the newest weights are in place."""

    @contextmanager
    def updating(self, stage: int) -> Iterator[None]:
        """Around a stage's update, which makes a new version of what it owns."""
        for notify in self.observers.update_begins:
            notify(stage)
        mine = [held for held in self.held[stage] if held.owner == stage]
        for held in mine:
            held.versions.show_newest()
            self._leave(held, held.versions.data[held.versions.shown])
            held.versions.advance(self._oldest(held))
        with _unsafe_preserve_version_counter(tuple(p for held in mine for p in held.versions.parameters)):
            yield
        for held in mine:
            held.versions.take_in()
            self._arrive(held, held.versions.data[held.versions.shown])
            held.seen = held.versions.newest
            if held.group is not None:
                self.ties.send_weights(held.group)
        for notify in self.observers.update_ends:
            notify(stage)

    @property
    def bytes(self) -> dict[int, int]:
        """Of all versions, by the stage that owns them, or that has a copy."""
        found = dict.fromkeys(self.own, 0)
        for versions, stage in {held.versions: held.stage for held in reversed(list(self.every()))}.items():
            found[stage] += versions.bytes
        return found

    def _named(self, held: Held, microbatch: int, version: int) -> int:
        """The version of these weights that a forward shall see; a stage that shares them is brought up to it."""
        if held.owner == held.stage:
            return version
        wanted = self.endless.named(held.owner, microbatch)
        self._bring(held, wanted)
        return wanted

    def _bring(self, held: Held, wanted: int) -> None:
        """A stage beside the owner's takes up versions, one after the other."""
        if held.far:
            self._follow(held, wanted)
        elif held.drift is not None or held.steps is not None:
            for version in range(held.seen + 1, wanted + 1):
                self._leave(held, held.versions.data[Key(version - 1)])
                self._arrive(held, held.versions.data[Key(version)], version)
        held.seen = max(held.seen, wanted)

    def _current(self, held: Held) -> Key:
        """What is newest for a stage: of a copy, what its last forward saw."""
        return Key(held.versions.newest if held.owner == held.stage else held.seen)

    def _ahead(self, held: Held, microbatch: int, version: int) -> Key:
        """The version itself, or a forecast of what it will be when the gradient comes to be used."""
        gap = microbatch // self.endless.shape.microbatches - version
        key = Key(version, gap if self.remedy.ahead else 0)
        if key.ahead and held.steps is not None:
            steps = held.steps.of(version)
            if steps is None:
                return Key(version)
            held.versions.forecast(key, steps)
        return key

    def _show(self, stage: int, keys: list[Key]) -> None:
        for held, key in zip(self.held[stage], keys, strict=True):
            held.versions.show(key)

    def _hold(self, stage: int, microbatch: int, keys: list[Key]) -> None:
        for held, key in zip(self.held[stage], keys, strict=True):
            held.versions.hold(key)
        self.live[stage, microbatch] = keys

    def _release(self, stage: int, microbatch: int) -> None:
        for held, key in zip(self.held[stage], self.live.pop((stage, microbatch)), strict=True):
            held.versions.release(key)
            held.versions.trim(self._oldest(held))

    def _oldest(self, held: Held) -> int:
        """The oldest version that anybody here will still name."""
        return min(self._oldest_of(user) for user in self.users[held.versions])

    def _oldest_of(self, held: Held) -> int:
        coming = self.next[held.stage]
        ended = self.total is not None and coming >= self.total
        named = FOREVER if ended else self.endless.named(held.owner, coming)
        looks_back = self.newest or held.steps is not None  # a copy's own newest, or the one that its step leads from
        return min(named, held.seen) if looks_back and held.owner != held.stage and not held.far else named

    @contextmanager
    def _corrected(self, stage: int) -> Iterator[None]:
        """PipeMare's T2: backward weights w - tau * delta."""
        bent = [held for held in self.held[stage] if held.drift is not None and not self.level]
        for held in bent:
            assert held.drift is not None
            held.versions.show_these(held.drift.corrected(held.versions.data[held.versions.shown]))
        try:
            yield
        finally:
            for held in bent:
                held.versions.show_these(held.versions.data[held.versions.shown])

    def _follow(self, held: Held, version: int) -> None:
        """Take up the versions of a copy that the owner has sent."""
        assert held.group is not None
        while held.versions.newest < version:
            held.versions.show_newest()
            self._leave(held, held.versions.data[held.versions.shown])
            held.versions.advance(FOREVER if self.newest else self._oldest(held))
            after = held.versions.data[held.versions.shown]
            torch._foreach_copy_(after, self.ties.receive_weights(held.group, held.stage))
            self._arrive(held, after)

    def _leave(self, held: Held, before: list[Tensor]) -> None:
        if held.drift is not None:
            held.drift.leave(before)
        if held.steps is not None and self.remedy.foreseen is None:
            held.steps.leave(before)

    def _arrive(self, held: Held, after: list[Tensor], version: int | None = None) -> None:
        version = held.versions.newest if version is None else version
        if held.drift is not None:
            held.drift.arrive(after)
        if held.steps is None:
            return
        if self.remedy.foreseen is None:
            held.steps.arrive(after, version)
        else:
            held.steps.take(self.remedy.foreseen(held.owner, held.versions.parameters), version)
        held.steps.trim(self._oldest_of(held))

    def _watch_drift(self) -> None:
        for held in self.every():
            between = self.endless.delay(held.stage) - self.endless.delay(held.stage, Op.B)
            if self.remedy.decay is not None and between > 0:
                held.drift = Drift(held.versions.parameters, between, self.remedy.decay)
            if self.remedy.ahead:
                held.steps = Steps(held.versions.parameters)

    def every(self) -> Iterable[Held]:
        """All weights of this process, once for each stage that uses them."""
        return (held for mine in self.held.values() for held in mine)
