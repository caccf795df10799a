"""Train the whole net, or some of it: python tests/wide/run.py [--ways inline,ranks] [--only PATTERN] ...

Results are kept in a file, so a run that was stopped goes on where it was. Each family has a time; one that crashes or
hangs ends its processes, which begin anew with the next.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from build import names  # noqa: E402

from ranks import Run, env  # noqa: E402

KEPT = HERE.parent.parent / ".zoo" / "results.json"
CHUNK, PATIENCE = 24, 90.0


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--ways", default="inline,ranks")
    words.add_argument("--schedules", default="1f1b,zb-h1")
    words.add_argument("--only", default="")
    words.add_argument("--again", default="", help="outcomes that are tried anew: wrong,refused,failed,'not tried'")
    asked = words.parse_args()
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for way in asked.ways.split(","):
        for schedule in asked.schedules.split(","):
            again = asked.again.split(",") if asked.again else []
            wanted = []
            for name in names():
                old = results.get(f"{name}|{way}|{schedule}")
                if re.search(asked.only, name) and (old is None or old["outcome"] in again or "all" in again):
                    wanted.append(name)
            while wanted:
                chunk, wanted = wanted[:CHUNK], wanted[CHUNK:]
                train(way, schedule, chunk, results)


def train(way: str, schedule: str, entries: list[str], results: dict[str, Any]) -> None:
    """Until each of them has a result."""
    left = list(entries)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done = launch(way, schedule, left, Path(folder))
        for name, record in done.items():
            results[f"{name}|{way}|{schedule}"] = record
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(results, indent=1, sort_keys=True))
        left = [name for name in left if name not in done]


def summary(record: dict[str, Any]) -> str:
    if "off" in record:
        return f"{record['outcome']} {record['off']:.1e} {record['against']} moved {record['moved']:.1e} {record.get('seconds')} s {record['farthest'] if record['outcome'] == 'wrong' else ''}"
    return f"{record['outcome']} {record['said'][:300]!r}"


def launch(way: str, schedule: str, entries: list[str], folder: Path) -> dict[str, Any]:
    """What came of the entries before one hung or crashed, and what came of that."""
    script, file, ranks = str(HERE / "train.py"), folder / "found", 2 if way == "ranks" else 0
    modules = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
    run = Run(
        [script, way, schedule, ";".join(entries), str(file)], env(), folder, fork=True, ranks=ranks, modules=modules
    )
    last, since, begun = 0, time.monotonic(), ""
    done: dict[str, Any] = {}
    said = ""
    try:
        while True:
            ended = run.process.poll()
            records = [json.loads(line) for line in _lines(Path(f"{file}.0"))]
            if len(records) > last:
                last, since = len(records), time.monotonic()
            for record in records:
                begun = record.get("begun", begun)
                if "entry" in record and record["entry"] not in done:
                    print(f"{way} {schedule} {record['entry']}: {summary(record)}", flush=True)
                    done[record["entry"]] = record
            if records and "ended" in records[-1]:
                return done
            if ended is not None:
                said = f"its process ended with {ended}: {run.said[-1500:]}"
                break
            if time.monotonic() - since > PATIENCE:
                said = f"not done after {PATIENCE:.0f} seconds"
                break
            time.sleep(0.1)
    finally:
        run.end()
    name = begun or entries[0]
    if name not in done:
        done[name] = {"entry": name, "outcome": "failed", "said": said}
        print(f"{way} {schedule} {name}: {summary(done[name])}", flush=True)
    elif not begun:
        raise SystemExit(said)
    return done


def _lines(file: Path) -> list[str]:
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


if __name__ == "__main__":
    main()
