"""Makespan of an order: the simulator's clock, reduced to what a search needs.

A rank works through its list and waits for tensors; a link carries one tensor at a time and never holds a rank up. All
orders of looking at the ranks give the same times, because every link has one sender.
"""

from __future__ import annotations

import math

from penstock.schedules.auto.instance import Instance, Order


def clock(instance: Instance, order: Order) -> tuple[float, list[list[float]]]:
    """Return the makespan, and the end of every action by rank; an infinite makespan where the order never ends."""
    needs, sends, seconds, readers = instance.needs, instance.sends, instance.seconds, instance.readers
    arrived: list[list[float]] = [[] for _ in range(instance.lanes)]
    done = [0] * (3 * instance.stages)
    free = [0.0] * instance.links
    ends: list[list[float]] = [[] for _ in order]
    awaited = [False] * instance.lanes
    todo = list(range(len(order)))[::-1]
    while todo:
        rank = todo.pop()
        rank_ends = ends[rank]
        now = rank_ends[-1] if rank_ends else 0.0
        for code in order[rank][len(rank_ends) :] if rank_ends else order[rank]:
            number = done[code]
            for lane in needs[code]:
                queue = arrived[lane]
                if number >= len(queue):
                    awaited[lane] = True
                    break
                if queue[number] > now:
                    now = queue[number]
            else:
                now += seconds[code]
                rank_ends.append(now)
                done[code] = number + 1
                for lane, link, busy, latency in sends[code]:
                    begin = now
                    if link >= 0:
                        begin = free[link] if free[link] > now else now
                        free[link] = begin + busy
                    arrived[lane].append(begin + busy + latency)
                    if awaited[lane]:
                        awaited[lane] = False
                        todo.append(readers[lane])
                continue
            break
    if any(len(times) < len(codes) for times, codes in zip(ends, order, strict=True)):
        return math.inf, ends
    return max(times[-1] + tail for times, tail in zip(ends, instance.tail, strict=True)), ends


def fits(instance: Instance, rank: int, codes: list[int]) -> bool:
    """Return whether one rank's list is in a sound order (forward, input, weight gradient) and within its memory."""
    grab, drop, cap, stages = instance.grab, instance.drop, instance.cap[rank], instance.stages
    done = [0] * (3 * stages)
    level = 0.0
    for code in codes:
        if code >= stages and done[code] >= done[code - stages]:
            return False
        done[code] += 1
        level += grab[code]
        if level > cap:
            return False
        level += drop[code]
    return True


def peak(instance: Instance, codes: list[int]) -> float:
    """Return the most memory that one rank's list holds."""
    level = top = 0.0
    for code in codes:
        level += instance.grab[code]
        top = max(top, level)
        level += instance.drop[code]
    return top
