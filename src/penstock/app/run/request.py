"""Where a command's work runs: in this process, as one of the ranks it was launched as, or on workers started here."""

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
from penstock.app.config.import_path import look_in
from penstock.app.config.schema import GivenModel, GPTModel
from penstock.app.config.task import Task
from penstock.comm.world.rendezvous import number
from penstock.core.memory_limit import memory_limit
from penstock.core.validation import shown
from penstock.errors import FormatError, InputError, PenstockError

MANY = 4  # workers a core: before more are started, this process finds out whether the model has as many stages


@dataclass(frozen=True)
class Request:
    """What a command was asked: a config, values in place of the file's, and flags that it knows."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    def task(self, double: bool = False) -> Task:
        look_in(Path(self.config).parent)
        return Task(read_config(self.config, self.changes), double)

    def words(self) -> list[str]:
        """This request as arguments of a worker, which `heard` understands."""
        return [self.config, "--changes", json.dumps(self.changes), "--flags", json.dumps(self.flags)]


def heard() -> Request:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--changes", type=json.loads, default={})
    parser.add_argument("--flags", type=json.loads, default={})
    asked = parser.parse_args()
    return Request(asked.config, asked.changes, asked.flags)


def start(module: str, work: Callable[[Request], int], request: Request, inline: bool) -> int:
    """Run a command's work and return its exit code. `module` is what a worker runs to do its share of it."""
    task = request.task()  # a config with faults is refused here, once
    stages = task.config.pipeline.stages
    _require_memory(task.config.model)
    if launched():
        if inline:
            came = f"{os.environ['WORLD_SIZE']} that were launched together"
            raise InputError("one process for --inline", came, "leave --inline out, or launch one")
        return work(request)
    if inline or stages == 1:
        return work(request)
    if stages > MANY * (os.cpu_count() or 1):
        task.pipeline(verify=False)  # refuses more stages than the model has layers
    from penstock.app.run.launcher import launch
    from penstock.app.run.worker_main import command

    return launch(command(module, request.words()), stages)


def _require_memory(model: GPTModel | GivenModel) -> None:
    """Refuse sizes that this machine cannot hold, before a model of them is made."""
    if not isinstance(model, GPTModel):
        return
    weights = 4 * model.width * (12 * model.width * model.layers + model.length)
    if weights > memory_limit():
        expected = f"sizes whose weights the {memory_limit() / 2**30:.3g} GiB of memory here hold"
        came = f"about {shown(weights // 2**30)} GiB of them"
        raise FormatError("model", expected, came, "lower width or layers")


def launched() -> bool:
    """Whether this process is one of several ranks."""
    return number(os.environ) is not None


def rank() -> int:
    found = number(os.environ)
    return 0 if found is None else found[0]


def as_worker(work: Callable[[Request], int]) -> None:
    """The main function of a worker that was given a request."""
    request = heard()
    saying_once(lambda: work(request))


def saying_once(work: Callable[[], int]) -> None:
    """End with the code of some work. What penstock itself refuses is said once, however many ranks find it."""
    try:
        sys.exit(work())
    except PenstockError as error:
        if not isinstance(error, InputError):
            raise
        if _first_to_say(error):
            print(f"penstock: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _first_to_say(error: InputError) -> bool:
    if not launched():
        return True
    from penstock.comm.world.world import join

    world = join()
    return world is None or world.store.add(f"refused/{zlib.crc32(str(error).encode())}", 1) == 1
