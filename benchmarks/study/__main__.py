"""python -m benchmarks.study: see the package."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.study.page import PAGE, PICTURES, cost, write
from benchmarks.study.pictures import draw
from benchmarks.study.plan import RESULTS, missing, read
from benchmarks.study.run import Run, train


def fill(path: Path, workers: int, most: int | None = None, updates: int | None = None) -> None:
    """Run what the file lacks; a line is written as soon as its run has ended, so that nothing is lost."""
    lines, begun = read(path), 0
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        going: dict[Future[dict[str, Any]], Run] = {}
        while True:
            for run in missing(lines):
                if len(going) == workers or begun == most:
                    break
                if run not in going.values():
                    going[pool.submit(train, run, updates)] = run
                    begun += 1
            if not going:
                return
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                del going[future]
                lines.append(future.result())
                with path.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print({name: value for name, value in lines[-1].items() if name != "curve"}, flush=True)


def main() -> None:
    given = argparse.ArgumentParser(prog="python -m benchmarks.study")
    given.add_argument("--results", type=Path, default=RESULTS, help="a line a run; runs that are there are kept")
    given.add_argument("--workers", type=int, default=2, help="processes that train at once, of one thread each")
    given.add_argument("--report", action="store_true", help="train nothing: tables and pictures of what is there")
    given.add_argument("--quick", action="store_true", help="a few short runs, and nothing kept")
    asked = given.parse_args()
    if asked.quick:
        with tempfile.TemporaryDirectory() as place:
            fill(Path(place) / "results.jsonl", asked.workers, most=12, updates=30)
        return
    if not asked.report:
        fill(asked.results, asked.workers)
    lines = read(asked.results)
    write(lines)
    print(PAGE, *draw(lines, PICTURES), cost(lines), sep="\n")


if __name__ == "__main__":
    main()
