"""The peer that people would reach for: the same 1F1B pipeline as simpy processes, stores and resources."""

from __future__ import annotations

import simpy


def simulate(slots, seconds, transfer):
    """One process a slot, one mailbox a message; returns the makespan. `slots` are those of plain_loop.build."""
    env = simpy.Environment()
    mailbox = {}
    links = {}

    def box(key):
        if key not in mailbox:
            mailbox[key] = env.event()
        return mailbox[key]

    def carry(link, key):
        with link.request() as turn:
            yield turn
            yield env.timeout(transfer)
        box(key).succeed()

    def work(slot, rows):
        for kind, op, k, peer in rows:
            if kind == "compute":
                yield env.timeout(seconds[op])
            elif kind == "send":
                link = links.setdefault((slot, peer), simpy.Resource(env))
                env.process(carry(link, (op, k, slot, peer)))
            else:
                yield box((op, k, peer, slot))

    for slot, rows in enumerate(slots):
        env.process(work(slot, rows))
    env.run()
    return env.now
