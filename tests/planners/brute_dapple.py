"""DAPPLE's plans one by one: all of them, or those of the published recursion, each priced from scratch."""

from __future__ import annotations

from math import inf

from penstock.core.group_costs import group_all_reduce, group_transfer
from penstock.planners.dapple_devices import machines, placements, rest
from planners.latency import latency


def price(profile, cluster, microbatches, placed):
    """L of a complete list of (end, devices), infinite where a stage does not fit."""
    forward, backward, reduce, first = [], [], [], 0
    for at, (last, devices) in enumerate(placed):
        layers, n = profile.layers[first:last], len(devices)
        pace = n * min(cluster.devices[d].speed for d in devices)
        held = sum(2 * x.parameter_bytes + x.buffer_bytes + x.optimizer_bytes + x.kept_bytes / n for x in layers)
        if held > min(cluster.devices[d].memory for d in devices):
            return inf
        each, wait = group_all_reduce(cluster, devices)
        forward.append(sum(x.forward for x in layers) / pace)
        backward.append(sum(x.input_grad + x.weight_grad for x in layers) / pace)
        reduce.append(each * sum(x.parameter_bytes for x in layers) + wait)
        if last < len(profile.layers):
            senders = {a for a, b in profile.edges if first <= a < last <= b}
            seconds, wait = group_transfer(cluster, devices, placed[at + 1][1])
            hop = seconds * sum(profile.layers[a].output_bytes for a in senders) + wait
            forward, backward, reduce = [*forward, hop], [*backward, hop], [*reduce, 0.0]
        first = last
    return latency(forward, backward, reduce, microbatches).total


def next_stages(used, size, end, layers):
    """Every stage that may come next, the last one excepted."""
    left = size * len(used) - sum(used)
    for count in range(1, left):
        for after, devices in placements(used, size, count):
            for last in range(end + 1, layers):
                yield after, (last, devices)


def exhaustive(profile, cluster, microbatches):
    """The least L of all plans."""
    hosts, size = machines(cluster)
    layers = len(profile.layers)

    def best(used, end, placed):
        found = price(profile, cluster, microbatches, [*placed, (layers, rest(used, size))])
        for after, stage in next_stages(used, size, end, layers):
            found = min(found, best(after, stage[0], [*placed, stage]))
        return found

    return best((0,) * hosts, 0, [])


def recursion(profile, cluster, microbatches):
    """The published one: each state remembers the prefix with the least L of prefix and rest (no memory limits)."""
    hosts, size = machines(cluster)
    layers = len(profile.layers)
    start = (0,) * hosts
    known = {(start, 0): (price(profile, cluster, microbatches, [(layers, rest(start, size))]), [])}
    for total in range(size * hosts):
        for (used, end), (_, placed) in sorted(item for item in known.items() if sum(item[0][0]) == total):
            for after, stage in next_stages(used, size, end, layers):
                grown = [*placed, stage]
                cost = price(profile, cluster, microbatches, [*grown, (layers, rest(after, size))])
                if cost < known.get((after, stage[0]), (inf, []))[0]:
                    known[after, stage[0]] = (cost, grown)
    return min(cost for cost, _ in known.values())
