"""What a lowered schedule computes, as expressions: an interpreter that shares no code with the checker.

Written from the meaning of the words alone (action.py). Slots run their lists and pass messages; a tensor is an
expression:

    forward        fwd(stage, weights, inputs or data)
    input gradient gin(stage it is for, forward, weights, incoming gradients or loss)
    weight gradient  gw(forward, weights, incoming)
    weights        init(stage), then update(weights, multiset of weight gradients)

Equal expressions get equal numbers (`Terms`), so two schedules do the same training exactly when the numbers of their
last weights are equal, whatever the order of their actions. Where replicas split a micro-batch, every expression is of
one *grain* of rows, fine enough for all replica counts: so a replicated run and a plain one give the same numbers.

Whatever a machine could not do raises `Broken`: a wait without end, a tensor or version that is not there, a tensor
made or sent twice, anything left over at the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import lcm

from penstock.core.action import Action, Op
from penstock.core.schedule import Schedule
from penstock.core.shape import Law, Shape, Sharing

Grains = dict[int, int]  # grain of rows -> expression
ALIVE = {Law.SYNC: 1, Law.NEWEST: 1, Law.TWO_BW: 2}  # weight versions that a method keeps; the others stash


class Broken(Exception):
    """Something that no machine could do."""


class Terms:
    """Numbers for expressions: the same parts, the same number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, *parts: object) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))


@dataclass
class Outcome:
    """The last weights by (stage, replica), and the version that each (F, I or W, stage, replica, micro-batch) used."""

    weights: dict[tuple[int, int], int] = field(default_factory=dict)
    uses: dict[tuple[str, int, int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """A shape's plain fields, and what follows from them."""

    placement: tuple[int, ...]
    replicas: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    split: bool
    law: Law

    @classmethod
    def of(cls, shape: Shape) -> Frame:
        return cls(shape.placement, shape.replicas, shape.edges, shape.sharing is Sharing.SPLIT, shape.law)

    def copies(self, stage: int) -> int:
        return self.replicas[self.placement[stage]]

    def grains(self, rank: int, replica: int) -> range:
        """The rows of a micro-batch that one replica of a rank handles."""
        if not self.split:
            return range(1)
        grain = lcm(*self.replicas)
        return range(replica * grain // self.replicas[rank], (replica + 1) * grain // self.replicas[rank])

    def before(self, stage: int) -> list[int]:
        return sorted(a for a, b in self.edges if b == stage)

    def after(self, stage: int) -> list[int]:
        return sorted(b for a, b in self.edges if a == stage)

    def together(self, a: int, b: int) -> bool:
        return self.placement[a] == self.placement[b]


@dataclass
class Slot:
    """One machine: its list, how far it came, and all it holds."""

    number: int
    rank: int
    replica: int
    todo: list[Action]
    at: int = 0
    weights: dict[int, dict[int, int]] = field(default_factory=dict)  # stage -> version -> expression
    newest: dict[int, int] = field(default_factory=dict)
    gathered: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # weight gradients of a stage
    outputs: dict[tuple[int, int], Grains] = field(default_factory=dict)  # (stage, k): forwards waiting for a backward
    halves: dict[tuple[int, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)  # between I and W
    made: dict[tuple[int, int, int], Grains] = field(default_factory=dict)  # (for stage, by stage, k): input gradients
    inbox: dict[tuple[str, int, int, int], Grains] = field(default_factory=dict)  # (F or B, edge, k): received

    def weight(self, stage: int, version: int) -> int:
        if stage not in self.weights:
            raise Broken(f"stage {stage} is not on rank {self.rank}")
        if version not in self.weights[stage]:
            raise Broken(f"stage {stage} has no version {version}")
        return self.weights[stage][version]


def interpret(schedule: Schedule, terms: Terms, transfers: str = "buffered") -> Outcome:
    """Run a lowered schedule; raise Broken where it cannot run."""
    return Interpreter(schedule, terms, transfers).run()


class Interpreter:
    def __init__(self, schedule: Schedule, terms: Terms, transfers: str) -> None:
        if not schedule.lowered:
            raise ValueError("lower the schedule first")
        self.frame, self.terms, self.transfers = Frame.of(schedule.shape), terms, transfers
        self.mail: dict[tuple[object, ...], Grains] = {}  # by what the words say: way, edge, both replicas, micro-batch
        self.sent: set[tuple[object, ...]] = set()
        self.lines: dict[tuple[int, int], deque[tuple[object, ...]]] = defaultdict(deque)  # order between two slots
        self.handed: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)  # (stage, version) -> by replica
        self.outcome = Outcome()
        self.slots: list[Slot] = []
        self.home: dict[tuple[int, int], Slot] = {}
        for rank, copies in enumerate(self.frame.replicas):
            for replica in range(copies):
                self._add_slot(schedule, rank, replica)

    def _add_slot(self, schedule: Schedule, rank: int, replica: int) -> None:
        slot = Slot(len(self.slots), rank, replica, list(schedule.actions(len(self.slots))))
        for stage, at in enumerate(self.frame.placement):
            if at == rank:
                slot.weights[stage] = {0: self.terms.of("init", stage)}
                slot.newest[stage] = 0
                self.home[stage, replica] = slot
        self.slots.append(slot)

    def run(self) -> Outcome:
        moved = True
        while moved:
            moved = sum(self._advance(slot) for slot in self.slots) > 0
        for slot in self.slots:
            if slot.at < len(slot.todo):
                raise Broken(f"slot {slot.number} is stuck at {slot.todo[slot.at]}")
        self._require_empty()
        for (stage, replica), slot in self.home.items():
            self.outcome.weights[stage, replica] = slot.weights[stage][slot.newest[stage]]
        return self.outcome

    def _advance(self, slot: Slot) -> bool:
        """Run a slot as far as it goes; says whether it moved."""
        before = slot.at
        while slot.at < len(slot.todo) and self._can(slot, slot.todo[slot.at]):
            self._do(slot, slot.todo[slot.at])
            slot.at += 1
        return slot.at > before

    def _require_empty(self) -> None:
        if self.mail:
            raise Broken(f"never received: {sorted(map(str, self.mail))[0]}")
        if self.handed:
            raise Broken(f"reduced but never used: {sorted(self.handed)[0]}")
        for slot in self.slots:
            for what in ("outputs", "halves", "made", "inbox"):
                if getattr(slot, what):
                    raise Broken(f"slot {slot.number} is left with {what} {sorted(getattr(slot, what))[0]}")
            if any(slot.gathered.values()):
                raise Broken(f"slot {slot.number} is left with gradients that no update used")

    # What an action waits for.

    def _can(self, slot: Slot, action: Action) -> bool:
        if action.op in (Op.RECV_F, Op.RECV_B):
            key = self._key(slot, action)
            if self.transfers == "in-order" and key in self.mail:
                line = self.lines[self._far(action).number, slot.number]
                if line[0] != key:
                    raise Broken(f"{action} finds another message at the head of the line")
            return key in self.mail
        if action.op in (Op.SEND_F, Op.SEND_B) and self.transfers == "blocking":
            return self._meets(slot, action)
        if action.op is Op.UPDATE:
            handed = self.handed.get((action.stage, action.version), {})
            return slot.replica not in handed or len(handed) == self.frame.copies(action.stage)
        return True

    def _far(self, action: Action) -> Slot:
        far = self.home.get((action.peer, action.replica))
        if far is None:
            raise Broken(f"{action}: there is no such replica")
        return far

    def _meets(self, slot: Slot, action: Action) -> bool:
        """Does the other slot stand at the receive of this message?"""
        far = self._far(action)
        other = far.todo[far.at] if far.at < len(far.todo) else None
        twin = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}[action.op]
        return other is not None and other.op is twin and self._key(far, other) == self._key(slot, action)

    def _key(self, slot: Slot, action: Action) -> tuple[object, ...]:
        """The message that a transfer names, the same from both ends: way, sender, receiver, micro-batch."""
        way = "F" if action.op in (Op.SEND_F, Op.RECV_F) else "B"
        near, far = (action.stage, slot.replica), (action.peer, action.replica)
        if action.op in (Op.RECV_F, Op.RECV_B):
            near, far = far, near
        return (way, *near, *far, action.microbatch)

    # What an action does.

    def _do(self, slot: Slot, action: Action) -> None:
        if action.stage not in slot.weights:
            raise Broken(f"{action}: stage {action.stage} is not on rank {slot.rank}")
        match action.op:
            case Op.F:
                self._forward(slot, action)
            case Op.B | Op.I:
                self._backward(slot, action)
            case Op.W:
                self._weight_gradient(slot, action)
            case Op.FB:
                self._overlapped(slot, action)
            case Op.SEND_F | Op.SEND_B:
                self._send(slot, action)
            case Op.RECV_F | Op.RECV_B:
                self._receive(slot, action)
            case Op.REDUCE:
                self._reduce(slot, action)
            case Op.UPDATE:
                self._update(slot, action)

    def _use(self, letter: str, slot: Slot, action: Action) -> int:
        self.outcome.uses[letter, action.stage, slot.replica, action.microbatch] = action.version
        return slot.weight(action.stage, action.version)

    def _complete(self, slot: Slot, grains: Grains | None, what: str) -> Grains:
        if grains is None or any(grain not in grains for grain in self.frame.grains(slot.rank, slot.replica)):
            raise Broken(f"slot {slot.number} lacks {what}")
        return grains

    def _forward(self, slot: Slot, action: Action) -> None:
        s, k = action.stage, action.microbatch
        weights = self._use("F", slot, action)
        if (s, k) in slot.outputs:
            raise Broken(f"{action} runs a second time")
        parts = []
        for a in self.frame.before(s):
            here = slot.outputs.get((a, k)) if self.frame.together(a, s) else slot.inbox.pop(("F", a, s, k), None)
            parts.append(self._complete(slot, here, f"the input of {action} from stage {a}"))
        made: Grains = {}
        for grain in self.frame.grains(slot.rank, slot.replica):
            inputs = tuple(part[grain] for part in parts) or (self.terms.of("data", k, grain),)
            made[grain] = self.terms.of("fwd", s, weights, inputs)
        slot.outputs[s, k] = made

    def _incoming(self, slot: Slot, action: Action) -> Iterator[tuple[int, tuple[int, ...]]]:
        s, k = action.stage, action.microbatch
        parts = []
        for b in self.frame.after(s):
            here = slot.made.pop((s, b, k), None) if self.frame.together(s, b) else slot.inbox.pop(("B", s, b, k), None)
            parts.append(self._complete(slot, here, f"the gradient for {action} from stage {b}"))
        for grain in self.frame.grains(slot.rank, slot.replica):
            yield grain, tuple(part[grain] for part in parts) or (self.terms.of("loss", s, k, grain),)

    def _backward(self, slot: Slot, action: Action) -> None:
        s, k = action.stage, action.microbatch
        weights = self._use("I", slot, action)
        kept = slot.outputs.pop((s, k), None)
        if kept is None:
            raise Broken(f"{action} has no forward")
        halves: dict[int, tuple[int, ...]] = {}
        for grain, incoming in self._incoming(slot, action):
            halves[grain] = (kept[grain], weights, *incoming)
            for a in self.frame.before(s):
                slot.made.setdefault((a, s, k), {})[grain] = self.terms.of("gin", a, kept[grain], weights, incoming)
        if (s, k) in slot.halves:
            raise Broken(f"{action} runs a second time")
        slot.halves[s, k] = halves
        if action.op is Op.B:
            self._weight_gradient(slot, action)

    def _weight_gradient(self, slot: Slot, action: Action) -> None:
        weights = self._use("W", slot, action)
        halves = slot.halves.pop((action.stage, action.microbatch), None)
        if halves is None:
            raise Broken(f"{action} has no input gradient")
        for forward, earlier, *incoming in halves.values():
            used = weights if weights == earlier else (earlier, weights)
            slot.gathered[action.stage].append(self.terms.of("gw", forward, used, tuple(incoming)))

    def _overlapped(self, slot: Slot, action: Action) -> None:
        """The backward goes first: side by side, neither may lean on what the other makes."""
        backward = action.joined
        if backward is None or backward.op is not Op.B:
            raise Broken(f"{action} overlaps no backward")
        if backward.stage not in slot.weights:
            raise Broken(f"{backward}: stage {backward.stage} is not on rank {slot.rank}")
        self._backward(slot, backward)
        self._forward(slot, action)

    def _send(self, slot: Slot, action: Action) -> None:
        s, k, key = action.stage, action.microbatch, self._key(slot, action)
        far = self._far(action)
        if key in self.sent:
            raise Broken(f"{action} is sent a second time")
        if action.op is Op.SEND_F:
            store = slot.outputs.get((s, k))
        else:
            store = slot.made.get((action.peer, s, k))
        if store is None:
            raise Broken(f"{action}: there is nothing to send")
        rows = [grain for grain in self.frame.grains(far.rank, far.replica) if grain in store]
        if not rows:
            raise Broken(f"{action}: the two share no rows")
        self.mail[key] = {grain: store[grain] for grain in rows}
        self.sent.add(key)
        self.lines[slot.number, far.number].append(key)
        if action.op is Op.SEND_B:  # an activation stays for its backward; an input gradient is gone once sent
            for grain in rows:
                del store[grain]
            if not store:
                del slot.made[action.peer, s, k]

    def _receive(self, slot: Slot, action: Action) -> None:
        key = self._key(slot, action)
        self.lines[self._far(action).number, slot.number].remove(key)
        if action.op is Op.RECV_F:
            place = ("F", action.peer, action.stage, action.microbatch)
        else:
            place = ("B", action.stage, action.peer, action.microbatch)
        slot.inbox.setdefault(place, {}).update(self.mail.pop(key))

    def _reduce(self, slot: Slot, action: Action) -> None:
        handed = self.handed[action.stage, action.version]
        if slot.replica in handed or action.version <= slot.newest[action.stage]:
            raise Broken(f"{action} is reduced a second time")
        handed[slot.replica] = slot.gathered.pop(action.stage, [])

    def _update(self, slot: Slot, action: Action) -> None:
        stage, version = action.stage, action.version
        if version != slot.newest[stage] + 1:
            raise Broken(f"{action} where version {slot.newest[stage] + 1} is next")
        handed = self.handed.get((stage, version), {})
        if slot.replica in handed:
            gradients = [gradient for part in handed.values() for gradient in part]
        else:
            gradients = slot.gathered.pop(stage, [])
        old = slot.weights[stage][slot.newest[stage]]
        slot.newest[stage] = version
        slot.weights[stage][version] = self.terms.of("update", old, tuple(sorted(gradients)))
        for dropped in range(version - ALIVE.get(self.frame.law, version + 1) + 1):
            slot.weights[stage].pop(dropped, None)
        self._leave(slot, stage, version)

    def _leave(self, slot: Slot, stage: int, version: int) -> None:
        """A reduction is over when all its members have updated."""
        if all(self.home[stage, r].newest[stage] >= version for r in range(self.frame.copies(stage))):
            self.handed.pop((stage, version), None)
