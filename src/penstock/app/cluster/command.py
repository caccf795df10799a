"""`penstock cluster measure`: write a cluster file for the devices at hand.

One rank for each device measures: workers started on this host, or the ranks that torchrun has launched on one host or
many. Rank 0 writes the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from penstock.app.cluster.measure import count_devices, measure
from penstock.app.run.request import exit_with, launched
from penstock.app.run.train import require_writable
from penstock.comm.world.world import join
from penstock.core.validation import whole
from penstock.errors import InputError


def measure_command(output: Path | None = None, devices: int | None = None, json_wanted: bool = False) -> int:
    """Run the command; return its exit code."""
    if devices is not None:
        whole("--devices", devices)
    if launched():
        if devices is not None:
            raise InputError("no --devices under torchrun, which sets the number", devices, "leave it out")
        return work(output, json_wanted)
    count = count_devices(devices)
    require_writable(None if output is None else str(output), "a cluster file")
    if count == 1:
        return work(output, json_wanted)
    from penstock.app.run.launcher import launch
    from penstock.app.run.worker_main import command

    arguments = [] if output is None else ["--output", str(output)]
    return launch(command("penstock.app.cluster.command", [*arguments, *["--json"] * json_wanted]), count)


def work(output: Path | None, json_wanted: bool) -> int:
    """Measure as one rank; rank 0 writes the result."""
    world = join()
    measured = measure(world)
    if world is not None and world.rank:
        return 0
    for doubt in measured.doubts:
        print(f"penstock: {doubt}", file=sys.stderr)
    text = measured.to_toml()
    if output is not None:
        require_writable(str(output), "a cluster file")
        output.write_text(text, encoding="utf-8")
        print(f"wrote {output}", file=sys.stderr)
    if json_wanted:
        print(json.dumps(measured.to_json()))
    elif output is None:
        print(text, end="")
    return 0


def _work_from_arguments() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    return work(arguments.output, arguments.json)


if __name__ == "__main__":
    exit_with(_work_from_arguments)
