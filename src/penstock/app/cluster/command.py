"""`penstock cluster measure`: a cluster file from what is here.

One rank a device does the measuring: workers started on this host, or the ranks that torchrun has launched, on one
host or many. Rank 0 writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from penstock.app.cluster.measure import count_devices, measure
from penstock.app.run.request import launched, saying_once
from penstock.app.run.train import require_writable
from penstock.comm.world.world import join
from penstock.core.validation import whole
from penstock.errors import InputError


def measure_command(output: Path | None = None, devices: int | None = None, json_wanted: bool = False) -> int:
    """The body of the command; returns its exit code."""
    if devices is not None:
        whole("--devices", devices)
    if launched():
        if devices is not None:
            raise InputError("no --devices under torchrun, which says how many", devices, "leave it out")
        return work(output, json_wanted)
    count = count_devices(devices)
    require_writable(None if output is None else str(output), "a cluster file")
    if count == 1:
        return work(output, json_wanted)
    from penstock.app.run.launcher import launch
    from penstock.app.run.worker_main import command

    words = [] if output is None else ["--output", str(output)]
    return launch(command("penstock.app.cluster.command", [*words, *["--json"] * json_wanted]), count)


def work(output: Path | None, json_wanted: bool) -> int:
    """A rank's share of it."""
    world = join()
    found = measure(world)
    if world is not None and world.rank:
        return 0
    for doubt in found.doubts:
        print(f"penstock: {doubt}", file=sys.stderr)
    text = found.to_toml()
    if output is not None:
        require_writable(str(output), "a cluster file")
        output.write_text(text, encoding="utf-8")
        print(f"wrote {output}", file=sys.stderr)
    if json_wanted:
        print(json.dumps(found.to_json()))
    elif output is None:
        print(text, end="")
    return 0


def _heard() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    return work(asked.output, asked.json)


if __name__ == "__main__":
    saying_once(_heard)
