"""The peer: what one writes first. Build a 1F1B list, then a worklist over slots with dictionaries of what has arrived.

It does what the simulator does, and no more: start and end of every action, sends and receives as actions of their own,
and links that carry one tensor at a time each way. It checks nothing.
"""

from __future__ import annotations


def build(p, m):
    """Rank r: p-1-r forwards ahead, then one forward, one backward; transfers where data crosses ranks."""
    slots = []
    for r in range(p):
        rows = []
        compute = [("F", k) for k in range(min(p - 1 - r, m))]
        ahead = len(compute)
        for k in range(m):
            if k + ahead < m:
                compute.append(("F", k + ahead))
            compute.append(("B", k))
        for op, k in compute:
            source = r - 1 if op == "F" else r + 1
            target = r + 1 if op == "F" else r - 1
            if 0 <= source < p:
                rows.append(("recv", op, k, source))
            rows.append(("compute", op, k, None))
            if 0 <= target < p:
                rows.append(("send", op, k, target))
        slots.append(rows)
    return slots


def simulate(slots, seconds, transfer):
    """The worklist loop: returns [(start, end), ...] for every slot."""
    arrived = {}
    link_free = {}
    times = [[] for _ in slots]
    now = [0.0] * len(slots)
    at = [0] * len(slots)
    waiting = {}
    ready = list(range(len(slots)))
    while ready:
        slot = ready.pop()
        rows, out, t = slots[slot], times[slot], now[slot]
        while at[slot] < len(rows):
            kind, op, k, peer = rows[at[slot]]
            if kind == "compute":
                out.append((t, t + seconds[op]))
                t += seconds[op]
            elif kind == "send":
                begin = max(t, link_free.get((slot, peer), 0.0))
                link_free[slot, peer] = begin + transfer
                arrived[op, k, slot, peer] = begin + transfer
                out.append((begin, begin + transfer))
                if waiting.get(peer) == (op, k, slot, peer):
                    del waiting[peer]
                    ready.append(peer)
            else:
                key = (op, k, peer, slot)
                if key not in arrived:
                    waiting[slot] = key
                    break
                end = max(t, arrived.pop(key))
                out.append((t, end))
                t = end
            at[slot] += 1
        now[slot] = t
    return times
