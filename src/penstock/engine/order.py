"""An order in which one process can run all slots of a proven schedule: rank by rank, each as far as it can go."""

from __future__ import annotations

from penstock.core.action import Action, Op
from penstock.core.check import Proven


def dependency_order(proven: Proven) -> list[tuple[int, Action]]:
    """Every action with its slot; what an action needs comes before it."""
    schedule, pairs = proven.schedule, proven.pairs
    at = schedule.starts[:-1].tolist()
    ends = schedule.starts[1:].tolist()
    order: list[tuple[int, Action]] = []
    moved = True
    while moved:
        moved = False
        for slot in range(schedule.shape.slots):
            while at[slot] < ends[slot]:
                action = schedule.action(at[slot])
                if action.op in (Op.RECV_F, Op.RECV_B):
                    way = 0 if action.op is Op.RECV_F else 1
                    sent = int(pairs.sends[way, pairs.lane[at[slot]], action.microbatch])
                    if at[schedule.shape.slot(action.peer, action.replica)] <= sent:
                        break
                order.append((slot, action))
                at[slot] += 1 if action.joined is None else 2
                moved = True
    return order
