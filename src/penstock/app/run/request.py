"""Run a command's work in this process, as one of the ranks it was launched as, or on workers started here."""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.app.config.file import read_config
from penstock.app.config.import_path import add_import_folders
from penstock.app.config.schema import GivenModel, GPTModel
from penstock.app.config.task import Task
from penstock.comm.world.rendezvous import rank_and_size
from penstock.core.memory_limit import memory_limit
from penstock.core.validation import shown
from penstock.errors import FormatError, InputError, PenstockError

MANY = 4  # workers a core: before more are started, this process checks that the model has enough layers


@dataclass(frozen=True)
class Request:
    """A command's config, values in place of the file's, and the command's flags."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    def task(self, double: bool = False) -> Task:
        """Return the task of the config."""
        add_import_folders(Path(self.config).parent)
        return Task(read_config(self.config, self.changes), double)

    def arguments(self) -> list[str]:
        """Return this request as arguments of a worker, which `parse_request` reads."""
        return [self.config, "--changes", json.dumps(self.changes), "--flags", json.dumps(self.flags)]


def parse_request() -> Request:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--changes", type=json.loads, default={})
    parser.add_argument("--flags", type=json.loads, default={})
    arguments = parser.parse_args()
    return Request(arguments.config, arguments.changes, arguments.flags)


def start(module: str, work: Callable[[Request], int], request: Request, inline: bool) -> int:
    """Run a command's work and return its exit code. `module` is the module that a worker runs."""
    task = request.task()  # a faulty config is refused here, once for all workers
    workers = task.config.pipeline.workers
    _require_memory(task.config.model)
    if launched():
        if inline:
            came = f"{os.environ['WORLD_SIZE']} that were launched together"
            raise InputError("one process for --inline", came, "leave --inline out, or launch one")
        return work(request)
    if inline or workers == 1:
        return work(request)
    if workers > MANY * (os.cpu_count() or 1):
        task.pipeline(verify=False)  # raises if there are more stages than layers
    from penstock.app.run.launcher import launch
    from penstock.app.run.worker_main import command

    return launch(command(module, request.arguments()), workers)


def _require_memory(model: GPTModel | GivenModel) -> None:
    """Raise, before the model is built, if its weights do not fit into this machine's memory."""
    if not isinstance(model, GPTModel):
        return
    weights = 4 * model.width * (12 * model.width * model.layers + model.length)
    if weights > memory_limit():
        expected = f"sizes whose weights the {memory_limit() / 2**30:.3g} GiB of memory here hold"
        weight_memory = f"about {shown(weights // 2**30)} GiB of them"
        raise FormatError("model", expected, weight_memory, "lower width or layers")


def launched() -> bool:
    """Whether this process is one of several ranks."""
    return rank_and_size(os.environ) is not None


def rank() -> int:
    numbers = rank_and_size(os.environ)
    return 0 if numbers is None else numbers[0]


def run_worker(work: Callable[[Request], int]) -> None:
    """Run the work of a worker with the request in its arguments."""
    request = parse_request()
    exit_with(lambda: work(request))


def exit_with(work: Callable[[], int]) -> None:
    """Exit with the code of some work. An error in the user's input is printed once, however many ranks raise it."""
    try:
        sys.exit(work())
    except PenstockError as error:
        if not isinstance(error, InputError):
            raise
        if _first_to_report(error):
            print(f"penstock: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _first_to_report(error: InputError) -> bool:
    if not launched():
        return True
    from penstock.comm.world.world import join

    world = join()
    return world is None or world.store.add(f"refused/{zlib.crc32(str(error).encode())}", 1) == 1
