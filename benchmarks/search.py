"""search beside the planners of the literature, and how it grows.

    python -m benchmarks.search              every published profile on DAPPLE's clusters A, B and C
    python -m benchmarks.search --growth     seconds of a search by layers and devices

A line is one profile and cluster: seconds of a batch by search and by each planner, as a ratio to search's (1 or more:
search is at least as good), judged by the same simulator under the same memory; and the proven gap: no plan can be
faster by more. `took` is CPU seconds of search and of those planners. Plans of the planners are no candidates of
search. PipeDream's mini-batch is one micro-batch, so it is set beside a search for such batches. Planners of the
literature split a micro-batch over replicas without counting rows; search may do so here too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from penstock import Cluster, Device, Layer, Level, Profile
from penstock.app.plan.predict import predict
from penstock.app.plan.scorer import Scorer
from penstock.core.cluster_file import read_cluster
from penstock.core.text_profile import read_text_profile
from penstock.errors import InputError
from penstock.planners.registry import find_plan
from penstock.planners.search.find import search

PROFILES = Path(__file__).parents[2] / "shared" / "profiles"
CASES = {
    "vgg16": (64, 16),
    "resnet101": (64, 16),
    "gnmt_large": (64, 16),
    "vgg-19-pbs-32": (32, 64),
    "bert-48-pbs-2": (2, 32),
}
BATCHED, ALONE = ("balance", "gpipe", "dapple", "2bw"), ("pipedream",)


def searched(profile, cluster, microbatches):
    """Search for a batch of so many micro-batches, on the planners' own terms."""
    judges = {"evaluate": Scorer(cluster), "confirm": Scorer(cluster, folding=False)}
    return search(profile, cluster, microbatches=microbatches, whole_rows=False, margin=0.0, allow_async=True, **judges)


def beside(profile, cluster, microbatches, names):
    """Search's outcome, and (planner, ratio to search, whether its plan fits) of each."""
    ours = searched(profile, cluster, microbatches)
    rows = []
    for name in names:
        try:
            found = predict(find_plan(profile, cluster, name, microbatches), cluster)
        except InputError:
            rows.append((name, float("inf"), False))
            continue
        per_batch = found.step_seconds * microbatches * profile.samples / found.rows
        rows.append((name, per_batch / ours.seconds, not found.over))
    return ours, rows


def ratios(profile, cluster, microbatches=16):
    """All planners on a cluster by name."""
    machines = read_cluster(cluster)
    return [row for names, m in ((BATCHED, microbatches), (ALONE, 1)) for row in beside(profile, machines, m, names)[1]]


def table():
    heads = "".join(f"{name:>12}" for name in (*BATCHED, *ALONE))
    print(f"{'profile, cluster':<20} {'search':>10} {'plan':<28} {'gap':>6} {'took':>7}{heads}")
    for name, (samples, microbatches) in CASES.items():
        profile = read_text_profile(PROFILES / f"{name}.txt", samples)
        for letter in "abc":
            cluster, begin = read_cluster(f"dapple-{letter}"), time.process_time()
            ours, rows = beside(profile, cluster, microbatches, BATCHED)
            took = time.process_time() - begin
            _, more = beside(profile, cluster, 1, ALONE)
            cells = "".join(f"{ratio:>10.3f}x{' ' if fits else '*'}" for _, ratio, fits in rows + more)
            what = f"{ours.plan.schedule} {':'.join(map(str, ours.plan.replicas[:8]))}"
            line = f"{f'{name} {letter.upper()}':<20} {ours.seconds:>8.4f} s {what:<28} {ours.gap:>6.1%} {took:>5.1f} s"
            print(line + cells, flush=True)
    print("*: that plan does not fit the devices' memory")


def made(layers):
    """A Transformer of so many equal blocks between an embedding and a head."""
    block = Layer("block", 0.01, 0.01, 0.01, 16e6, 400e6, 200e6, 350e6, 0.0, 700e6)
    ends = [Layer("embedding", 0.001, 0.0, 0.001, 16e6, 1e6, 1e6, 800e6, 0.0, 1600e6),
            Layer("head", 0.004, 0.004, 0.004, 16e6, 100e6, 50e6, 800e6, 0.0, 1600e6)]  # fmt: skip
    return Profile((ends[0], *[block] * (layers - 2), ends[1]), samples=8)


def growth():
    print(f"{'layers':>6} {'devices':>8} {'seconds':>8} {'plans':>6} {'gap':>6}  plan")
    for layers, devices in ((24, 64), (48, 64), (96, 16), (96, 64), (96, 256), (96, 1024)):
        levels = (Level("inside", 8, 300e9, 5e-6), Level("between", devices // 8, 25e9, 1e-5))
        cluster, profile = Cluster.uniform(levels, Device("a100-80", 80e9)), made(layers)
        begin = time.process_time()
        judges = {"evaluate": Scorer(cluster), "confirm": Scorer(cluster, folding=False)}
        found = search(profile, cluster, microbatches=4 * devices // 8, allow_async=True, **judges)
        took = time.process_time() - begin
        plan = found.plan
        what = f"{plan.schedule}, {plan.ranks} ranks of {max(plan.replicas)}, m {plan.microbatches}"
        print(f"{layers:>6} {devices:>8} {took:>6.1f} s {found.simulated:>6} {found.gap:>6.1%}  {what}", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--growth", action="store_true", help="seconds by layers and devices")
    (growth if options.parse_args().growth else table)()


if __name__ == "__main__":
    main()
