"""The guard: checksums of training by every schedule, recorded once and compared bit for bit after each change.

    python tests/support/guard.py record FILE [--only TEXT] [--sample]
    python tests/support/guard.py check FILE [--only TEXT] [--sample]

A case is a schedule, a model and a setting (see guard_cases), run in four ways: two and four stages in one process, two
and four ranks. Each line of the record has the checksums of weights and buffers, of the optimizers' state, and of the
losses; or the class of the exception that refused the case. Both commands also compare ranks with one process. Exit
codes: 0 all equal; 1 something differs, each by name; 3 the record is of another machine or torch, whose bits differ
by right: check out the commit that it was made of, record there, and check against that.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import guard_cases
from guard_cases import Case

WAYS = {"2 stages": (2, False), "4 stages": (4, False), "2 ranks": (2, True), "4 ranks": (4, True)}
ALONE = {"2 ranks": "2 stages", "4 ranks": "4 stages"}  # what must have the same bits
SAMPLED = ("2 stages", "2 ranks")
LIMIT = 600.0  # seconds that all processes of one way may take for a case
SHORT = 8  # hexadecimal digits of a checksum in the record
Record = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description="Checksums of training, to be equal after each change.")
    parser.add_argument("command", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their line's name")
    parser.add_argument("--sample", action="store_true", help="a few cases, on two stages and two ranks")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with _folder() as folder:
        current = measure(wanted(asked.only, asked.sample), folder)
    print(f"{len(current)} runs in {time.monotonic() - began:.0f} s, {_refused(current)} of them refused")
    faults = unlike(current)
    if asked.command == "record":
        asked.file.write_text(text_of(fingerprint(), current))
        return report(faults)
    recorded = json.loads(asked.file.read_text())
    if recorded["machine"] != fingerprint():
        print(f"not compared with {asked.file}: recorded on {recorded['machine']}, this is {fingerprint()}")
        return report(faults) or 3
    everything = not (asked.only or asked.sample)
    return report(faults + differences(recorded["cases"], current, everything))


# -- which runs, and what they give ----------------------------------------------------------------------------------


def wanted(only: str, sample: bool) -> dict[str, list[Case]]:
    """The cases of each way that has any."""
    ways = SAMPLED if sample else tuple(WAYS)
    chosen = [case for case in guard_cases.cases() if not sample or case.name in guard_cases.SAMPLE]
    by_way = {way: [case for case in chosen if only in line(case, way)] for way in ways}
    return {way: cases for way, cases in by_way.items() if cases}


def line(case: Case, way: str) -> str:
    """The name of one run."""
    return f"{case.name} | {way}"


def measure(cases: dict[str, list[Case]], folder: Path) -> Record:
    """Run each way in processes of its own, forked from this one, which has loaded what they need."""
    for module in ("torch._dynamo", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    result: Record = {}
    for way, several in cases.items():
        ranks = WAYS[way][0] if WAYS[way][1] else 1
        _fork(way, several, ranks, folder)
        written = [_lines(folder / f"{way}.{rank}") for rank in range(ranks)]
        for case in several:
            result[line(case, way)] = merged([answers.get(case.name) for answers in written])
    return result


def merged(answers: list[Any]) -> str:
    """One run's line: what all ranks have in common, and all their optimizers."""
    if None in answers:
        return "died"
    refused = {answer["refused"] for answer in answers if "refused" in answer}
    if refused:
        causes = sorted(refused - {"RankError"}) or ["RankError"]  # the others are told of it, sooner or later
        return f"refused {' '.join(causes)}"
    if len({(answer["weights"], answer["losses"]) for answer in answers}) > 1:
        return "ranks that disagree"
    states = sorted(state for answer in answers for state in answer["optimizer"])
    sums = answers[0]["weights"], guard_cases.checksum(states), answers[0]["losses"]
    return " ".join(text[:SHORT] for text in sums)


# -- processes -------------------------------------------------------------------------------------------------------


def _fork(way: str, cases: list[Case], ranks: int, folder: Path) -> None:
    """Run all cases one after another in so many processes. One that dies leaves its lines out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = [_child(way, cases, rank, ranks, port, folder) for rank in range(ranks)]
    left, lines, until = list(children), -1, 0.0
    try:
        while left:
            if (now := _written(way, ranks, folder)) != lines:
                lines, until = now, time.monotonic() + LIMIT
            if time.monotonic() > until:
                break
            time.sleep(0.05)
            left = [child for child in left if os.waitpid(child, os.WNOHANG)[0] == 0]
    finally:
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _written(way: str, ranks: int, folder: Path) -> int:
    """Bytes of all answers so far."""
    files = [folder / f"{way}.{rank}" for rank in range(ranks)]
    return sum(file.stat().st_size for file in files if file.exists())


def _child(way: str, cases: list[Case], rank: int, ranks: int, port: int, folder: Path) -> int:
    """Fork one process; in it, run the cases and leave as an interpreter does."""
    parent = os.getpid()
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # when its parent dies
    if os.getppid() != parent:
        os._exit(1)
    if ranks > 1:
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    with (folder / f"{way}.{rank}").open("w") as out:
        for number, case in enumerate(cases):
            answer = _answer(case, WAYS[way][0], rank, folder / f"{way}, case {number}")
            print(json.dumps([case.name, answer]), file=out, flush=True)
    sys.exit(0)


def _answer(case: Case, ranks: int, rank: int, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    try:
        return asdict(guard_cases.run(case, ranks, rank, folder))
    except Exception as error:
        if os.environ.get("GUARD_SHOWS"):  # whoever looks into a refusal wants to see it
            traceback.print_exc()
        return {"refused": type(error).__name__}


def _lines(file: Path) -> dict[str, Any]:
    """What a process has written, up to its end or its death."""
    if not file.exists():
        return {}
    return dict(json.loads(text) for text in file.read_text().splitlines(keepends=True) if text.endswith("\n"))


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder, removed by the process that made it and by none that was forked from it."""
    owner, folder = os.getpid(), tempfile.mkdtemp()
    try:
        yield Path(folder)
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder)


# -- records ---------------------------------------------------------------------------------------------------------


def text_of(machine: dict[str, str], record: Record) -> str:
    """JSON with one line a run, in the order of their names."""
    cases = ",\n".join(f"{json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    return f'{{"machine": {json.dumps(machine)},\n"cases": {{\n{cases}\n}}}}\n'


def fingerprint() -> dict[str, str]:
    """What bits depend on beside the code: versions, the kernels that torch chooses, and what some of them compute."""
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(33, 17, generator=draw), torch.randn(17, 29, generator=draw)
    image, kernel = torch.randn(2, 3, 8, 8, generator=draw), torch.randn(4, 3, 3, 3, generator=draw)
    heads = torch.randn(2, 2, 8, 8, generator=draw)
    values = [
        a @ b,
        (a.half() @ b.half()),
        (a.bfloat16() @ b.bfloat16()),
        F.conv2d(image, kernel, padding=1),
        F.gelu(a),
    ]
    values += [a.exp(), a.tanh(), a.sum(), a.norm(), torch._foreach_norm([a, b])]
    values += [F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), F.layer_norm(a, (17,))]
    return {
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": guard_cases.checksum(values)[:SHORT],
    }


def unlike(current: Record) -> list[str]:
    """Ranks that do not give the bits of one process, which holds on every machine; and runs without a result."""
    faults = []
    for name, value in current.items():
        case, _, way = name.rpartition(" | ")
        alone = current.get(f"{case} | {ALONE[way]}") if way in ALONE else None
        if value in ("died", "ranks that disagree"):
            faults.append(f"{name}: {value}")
        elif (
            alone is not None and alone != value and not (guard_cases.only_alone(case) and value.startswith("refused"))
        ):
            faults.append(f"{name}: {_parts(alone, value)}, compared with one process")
    return faults


def differences(recorded: Record, current: Record, everything: bool) -> list[str]:
    """Each run that is not as recorded."""
    names = sorted({*recorded, *current} if everything else current)
    faults = []
    for name in names:
        before, now = recorded.get(name, "not there"), current.get(name, "not there")
        if before != now:
            faults.append(f"{name}: {_parts(before, now)}, compared with the record")
    return faults


def _parts(before: str, now: str) -> str:
    """Which of the checksums differ; or both values where one of them is none."""
    old, new = before.split(), now.split()
    kinds = ("weights", "optimizer state", "losses")
    if len(old) == len(new) == len(kinds) and "refused" not in (old[0], new[0]):
        return f"other {' and '.join(kind for kind, a, b in zip(kinds, old, new, strict=True) if a != b)}"
    return f"{before} is now {now}" if before != now else before


def _refused(current: Record) -> int:
    return sum(value.startswith("refused") for value in current.values())


def report(faults: list[str]) -> int:
    for fault in faults:
        print(fault)
    print(f"{len(faults)} differ" if faults else "all equal")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
