"""Train the whole net, or some of it, and write docs/models.md: python tests/wide/run.py [--ways inline,ranks] ...

Results are kept in .zoo, so a run that was stopped goes on where it was. Each entry has a time; one that crashes or
hangs ends its processes, which begin anew with the next.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from build import names  # noqa: E402
from table import table  # noqa: E402

from ranks import Run, env  # noqa: E402

ROOT = HERE.parent.parent
KEPT, TABLE = ROOT / ".zoo", ROOT / "docs" / "models.md"
SCHEDULES, RANKS = ("1f1b", "zb-h1"), 2
CHUNK, PATIENCE = 12, 300.0
MODULES = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")

Results = dict[str, dict[str, dict[str, Any]]]  # of an entry, by schedule


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--ways", default="inline,ranks", help="inline, ranks, or both; empty: the table only")
    words.add_argument("--schedules", default=",".join(SCHEDULES))
    words.add_argument("--only", default="", help="a pattern that names must have")
    words.add_argument("--again", default="", help="outcomes that are tried anew: wrong,refused,failed,'not tried'")
    words.add_argument("--table", action="store_true", help="write docs/models.md from what is kept")
    asked = words.parse_args()
    again = set(asked.again.split(","))
    for way in filter(None, asked.ways.split(",")):
        results = kept(way)
        if way == "ranks":  # are not asked for what cannot be built
            results |= {name: of for name, of in kept("inline").items() if is_untried(of)}
        schedules = asked.schedules.split(",")
        for schedule, name in product(schedules, names()):
            if results.get(name, {}).get(schedule, {}).get("outcome") in again:
                del results[name][schedule]
        wanted = [name for name in names() if re.search(asked.only, name) and lacking(results, name, schedules)]
        wanted = [name for name in wanted if not is_untried(results.get(name, {}))]
        for at in range(0, len(wanted), CHUNK):
            train(way, wanted[at : at + CHUNK], schedules, results)
    inline, ranks = kept("inline"), kept("ranks")
    if asked.table:
        TABLE.write_text(table(names(), inline, ranks))
    records = [record for way in (inline, ranks) for of in way.values() for record in of.values()]
    return int(any(record["outcome"] == "wrong" for record in records))


def is_untried(records: dict[str, dict[str, Any]]) -> bool:
    return any(record["outcome"] == "not tried" for record in records.values())


def lacking(results: Results, name: str, schedules: list[str]) -> bool:
    return not set(schedules) <= results.get(name, {}).keys()


def kept(way: str) -> Results:
    file = KEPT / f"{way}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def train(way: str, entries: list[str], schedules: list[str], results: Results) -> None:
    """Until each of them has a result."""
    left = entries
    while left:
        with tempfile.TemporaryDirectory() as folder:
            for name, records in launch(way, left, schedules, Path(folder)).items():
                results.setdefault(name, {}).update(records)
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{way}.json").write_text(json.dumps(results, indent=1, sort_keys=True))
        left = [name for name in left if lacking(results, name, schedules)]


def launch(way: str, entries: list[str], schedules: list[str], folder: Path) -> Results:
    """What came of the entries before one hung or crashed, and what came of that."""
    file = folder / "found"
    done: Results = {}
    words = [str(HERE / "train.py"), ",".join(schedules), ";".join(entries), str(file)]
    run = Run(words, env(), folder, fork=True, ranks=RANKS if way == "ranks" else 0, modules=MODULES)
    lines, since, at = 0, time.monotonic(), 0
    try:
        while at < len(entries):
            ended = run.process.poll()
            records = _records(file)
            for record in records[lines:]:
                print(f"{way} {record['schedule']} {record['entry']}: {summary(record)}", flush=True)
                done.setdefault(record["entry"], {})[record["schedule"]] = record
                since = time.monotonic()
            lines = len(records)
            at = sum(not lacking(done, name, schedules) for name in entries)
            late = time.monotonic() - since > PATIENCE
            if at < len(entries) and (late or ended is not None):
                said = f"not done after {PATIENCE:.0f} s" if late else f"ended with {ended}: {run.said[-1500:]}"
                print(f"{way} {entries[at]}: {said}", flush=True)
                failed = {"entry": entries[at], "outcome": "failed", "said": said}
                done[entries[at]] = dict.fromkeys(schedules, failed) | done.get(entries[at], {})
                break
            time.sleep(0.1)
        else:
            run.wait()
    finally:
        run.end()
    return done


def _records(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def summary(record: dict[str, Any]) -> str:
    if "off" in record:
        off = f"{record['off']:.1e} from {record['against']} ({record['farthest']})"
        return f"{record['outcome']}, {off}, {record['seconds']} s"
    return f"{record['outcome']}: {record['said'][:300]}"


if __name__ == "__main__":
    sys.exit(main())
