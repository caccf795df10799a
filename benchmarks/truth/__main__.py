"""python -m benchmarks.truth: see the package.

python -m benchmarks.truth                              all models, all schedules
python -m benchmarks.truth --rounds 1 --schedules 1f1b,2bw  one profile and one run, of two
python -m benchmarks.truth gpt --keep here               one model; profile, plans and figures stay in a folder

It needs torch, numpy, numba and scipy, and what lies in src (PYTHONPATH=src): nothing has to be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the workers are cores of this host
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))  # no step waits for pages: see docs/profile.md
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))

from benchmarks.truth.foreseen import RANKS, SCHEDULES, foresee, measure_cluster, measure_model, write_plan
from benchmarks.truth.models import MODELS
from benchmarks.truth.table import HEAD, Line, markdown, summary
from benchmarks.truth.workers import Plans
from benchmarks.workers.sampling import Samples, collect
from benchmarks.workers.team import Team
from penstock import Cluster

USUAL = ["gpt", "resnet", "mixer"]


@dataclass(frozen=True)
class Round:
    """A profile, what was predicted from it, and what the workers then took."""

    predicted: dict[str, float]
    seen: dict[str, Samples]

    def measured(self, name: str) -> float:
        return mean(self.seen[name].told(rank, "step") for rank in range(RANKS))


def one_round(model: str, cluster: Cluster, schedules: list[str], folder: Path, repetitions: int) -> Round:
    """Profile, plans, predictions; then the workers."""
    profile, parts = measure_model(model, folder), MODELS[model].microbatches
    found = {name: foresee(profile, cluster, name, parts) for name in schedules}
    plans = {name: write_plan(one, folder / f"{model}.{name}.json") for name, one in found.items()}
    with Team(RANKS, Plans, model, plans) as team:
        seen = collect(team, schedules, repetitions, patience=1)
    return Round({name: one.step_seconds for name, one in found.items()}, seen)


def lines_of(model: str, cluster: Cluster, schedules: list[str], folder: Path, asked: argparse.Namespace) -> list[Line]:
    """One model. A shared machine is faster one minute and slower the next, by a tenth and more: so several rounds of
    a profile and a run right after it, and the mean of what they predicted beside the mean of what they took."""
    rounds = [one_round(model, cluster, schedules, folder, asked.repetitions) for _ in range(asked.rounds)]
    samples = [{name: [vars(sample) for sample in one.seen[name].all] for name in schedules} for one in rounds]
    told = {"predicted": [one.predicted for one in rounds], "samples": samples}
    (folder / f"{model}.rounds.json").write_text(json.dumps(told))
    lines = []
    for name in schedules:
        predicted, measured = mean(one.predicted[name] for one in rounds), mean(one.measured(name) for one in rounds)
        kept, every = (sum(len(getattr(one.seen[name], which)) for one in rounds) for which in ("quiet", "all"))
        lines.append(Line(model, name, predicted, measured, f"({kept} of {every} samples were quiet)"))
    return lines


def main(arguments: list[str] | None = None) -> list[Line]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("models", nargs="*", default=USUAL, help=f"of {', '.join(MODELS)}")
    options.add_argument("--schedules", default=",".join(SCHEDULES), help="names with commas between")
    options.add_argument("--rounds", type=int, default=4, help="of a profile and a run of all schedules")
    options.add_argument("--repetitions", type=int, default=4, help="samples of each schedule in a round")
    options.add_argument("--keep", type=Path, help="a folder for profiles, cluster, plans and figures")
    asked = options.parse_args(arguments)
    schedules = asked.schedules.split(",")
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as passing:
        folder = asked.keep or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        cluster = measure_cluster(folder)
        print(HEAD, flush=True)
        for model in asked.models:
            lines += lines_of(model, cluster, schedules, folder, asked)
            print("\n".join(str(line) for line in lines if line.model == model), flush=True)
        print("\n".join(summary(lines)), flush=True)
        (folder / "found.json").write_text(json.dumps([vars(line) for line in lines], indent=1))
        (folder / "found.md").write_text(markdown(lines) + "\n")
    return lines


if __name__ == "__main__":
    main()
