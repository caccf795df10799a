"""PipeDream-2BW's planner: its formulas by hand, every choice by brute force, and what memory does to it."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from penstock import Cluster, Device, InputError, Layer, Level, Profile, schedule, simulate
from penstock.planners.balance import balance
from penstock.planners.scaled import scaled
from penstock.planners.two_bw import two_bw
from planners.brute import random_profile


def equal_layers(count, **figures):
    return Profile(tuple(Layer(f"L{at}", 1.0, 1.0, 1.0, **figures) for at in range(count)))


def one_level(devices, memory=float("inf"), bandwidth=10.0):
    return Cluster.uniform((Level("link", devices, bandwidth),), Device("d", memory))


def by_hand(profile, cluster, microbatches):
    """The best rows a second of one level of links without latency, where the layout cannot matter."""
    n, layers = len(cluster.devices), profile.layers
    bandwidth, room = cluster.levels[0].bandwidth, cluster.devices[0].memory
    rates = [0.0]
    for d, w, b, recompute in product(range(1, n + 1), range(1, n + 1), range(1, microbatches + 1), (False, True)):
        m, left = divmod(microbatches, b * w)
        if w * d > n or left or m < d or d > len(layers):
            continue
        times, held = [], []
        for stage in balance(profile, cluster, stages=d).plan.stages:
            mine = layers[stage.first : stage.last + 1]
            sent = [sum(layers[a].output_bytes for a in range(len(layers)) if a == at - 1 and 0 < at < len(layers))
                    for at in (stage.first, stage.last + 1)]  # fmt: skip
            compute = b * sum(x.seconds for x in mine) * (4 / 3 if recompute else 1)
            weights = sum(x.parameter_bytes for x in mine)
            times += [compute + b * sum(sent) / bandwidth, 2 * (w - 1) / w * weights / bandwidth / m]
            kept = sum(x.kept_bytes for x in mine)
            standing = 3 * weights + sum(x.optimizer_bytes for x in mine)
            held.append(standing + b * ((kept if recompute else d * kept) + d * sent[0]))
        if max(held) <= room:
            rates.append(b * w / max(times))
    return max(rates)


def test_equals_brute_force_on_300_random_chains():
    random = Random("2bw")
    refused = 0
    for _ in range(300):
        profile = random_profile(random, random.randint(1, 5))
        cluster = one_level(random.randint(1, 4), random.choice((float("inf"), 100.0, 200.0, 400.0)))
        microbatches = random.randint(1, 8)
        expected = by_hand(profile, cluster, microbatches)
        if not expected:
            refused += 1
            with pytest.raises(InputError, match="a plan that fits"):
                two_bw(profile, cluster, microbatches=microbatches)
            continue
        found = two_bw(profile, cluster, microbatches=microbatches)
        assert found.profile.samples / found.seconds == pytest.approx(expected)
    assert refused < 150


def test_memory_asks_for_depth_and_recompute():
    profile = equal_layers(4, kept_bytes=10, parameter_bytes=10)
    assert two_bw(profile, one_level(4), microbatches=16).plan.replicas == (4,)
    deep = two_bw(profile, one_level(4, memory=30 + 40), microbatches=16).plan
    assert (deep.replicas, deep.stages[0].recompute) == ((1, 1, 1, 1), False)
    tight = two_bw(profile, one_level(4, memory=30 + 10), microbatches=16).plan
    assert (tight.replicas, tight.stages[0].recompute) == ((1, 1, 1, 1), True)


def test_the_plan_runs_in_the_simulator_and_is_as_fast_as_said():
    profile = equal_layers(4, kept_bytes=10, parameter_bytes=10)
    found = two_bw(profile, one_level(4, memory=70.0), microbatches=8)
    plan = found.plan
    batches = 20
    built = schedule("2bw", stages=4, microbatches=plan.microbatches, batches=batches)
    line = simulate(built, profile=found.profile, plan=plan, cluster=one_level(4))
    steps = plan.microbatches * batches
    assert line.makespan == pytest.approx(found.seconds * (steps + 3))


def test_a_batch_of_another_size():
    profile = equal_layers(2, kept_bytes=10, output_bytes=4, parameter_bytes=10)
    whole = Profile((Layer("L", 1.0, 1.0, 1.0, full_backward=3.0, update=5.0),))
    assert (scaled(whole, 2).layers[0].backward, scaled(whole, 2).layers[0].update) == (6.0, 5.0)
    double = scaled(profile, 2)
    assert (double.layers[0].forward, double.layers[0].kept_bytes, double.layers[0].parameter_bytes) == (2.0, 20, 10)
    assert double.samples == 2
    assert scaled(profile, 1) is profile
    with pytest.raises(InputError, match="a micro-batch of at least 1 row, but got 0"):
        scaled(profile, 0)
