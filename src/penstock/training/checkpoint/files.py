"""The files of a checkpoint: tensors through torch.distributed.checkpoint, all other facts in one JSON file.

torch's own index of the tensors, `.metadata`, is written for other tools, and never read: it is a pickle, which could
run code. Our index is in the JSON file, with a checksum of every tensor.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from penstock.errors import FormatError
from penstock.training.checkpoint.atomic import sync
from penstock.training.checkpoint.facts import bare, require_facts, require_record, whole
from penstock.training.checkpoint.kept_steps import FACTS, require_checkpoint
from penstock.training.checkpoint.plain_values import dtype_of
from penstock.training.processes import raw

INDEX = ".metadata"
VERSION = 1
# the errors that Python, numpy and torch raise for values that no save has written
WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Record:
    """The place of one tensor; `crc` is the checksum of its values, row by row."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    crc: int

    @staticmethod
    def read(entry: dict[str, Any]) -> Record:
        shape = tuple(entry["shape"])
        return Record(entry["dtype"], shape, entry["file"], entry["offset"], entry["length"], entry["crc"])

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=dtype_of(self.dtype))


Records = dict[str, Record]


class _Writer(FileSystemWriter):
    """One rank's file; the index waits until all ranks have written."""

    def __init__(self, directory: Path, part: int) -> None:
        super().__init__(directory, overwrite=False)
        self.part = part
        self.written: list[WriteResult] = []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # torch names files by a plan's place in the list
        return super().prepare_global_plan([*[SavePlan([])] * self.part, *plans])[self.part :]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.written = [result for part in results for result in part]


class _Reader(FileSystemReader):
    """Reads tensors by our records."""

    def __init__(self, directory: Path, records: Records) -> None:
        super().__init__(directory)
        self.records = records

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _metadata(self.records)


def write_tensors(directory: Path, part: int, tensors: dict[str, torch.Tensor]) -> Records:
    """Write one rank's tensors into a file of its own in a directory that all ranks share."""
    if not directory.is_dir():
        raise FileNotFoundError(2, "no such directory on this host, and all hosts have to share it", str(directory))
    if not tensors:
        return {}
    writer = _Writer(directory, part)
    with _plainly():
        save(dict(tensors), storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    records = {}
    for result in writer.written:
        name, at = result.index.fqn, result.storage_data
        values = tensors[name]
        dtype, crc = str(values.dtype).removeprefix("torch."), zlib.crc32(raw(values))
        records[name] = Record(dtype, tuple(values.shape), at.relative_path, at.offset, at.length, crc)
    return records


def write_facts(directory: Path, facts: dict[str, Any], records: Records) -> None:
    """Write the two indexes, after all tensors, and sync everything to the disk."""
    sizes = {record.file: record.offset + record.length for record in _by_end(records)}
    _require_files(directory, sizes)
    metadata = _metadata(records)
    results = [WriteResult(index, info.length, info) for index, info in metadata.storage_data.items()]
    FileSystemWriter(directory, overwrite=False).finish(metadata, [results])
    body = {
        "version": VERSION,
        **facts,
        "files": sizes,
        "tensors": {name: asdict(record) for name, record in records.items()},
    }
    text = json.dumps({"checksum": _checksum(body), "facts": body})
    (directory / FACTS).write_text(text, encoding="utf-8")
    for name in (FACTS, INDEX):
        sync(directory / name)
    sync(directory)


def read_facts(directory: Path) -> tuple[dict[str, Any], Records]:
    """Read everything but the tensors; raise for files that are missing or too short."""
    path = directory / FACTS
    require_checkpoint(directory)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        facts = content["facts"]
        if content["checksum"] != _checksum(facts):
            raise ValueError("one whose checksum is another")
        if whole(facts["version"], "version") != VERSION:
            raise ValueError(f"version {facts['version']!r}")
        sizes = {bare(name): whole(size, "a file's size") for name, size in facts.pop("files").items()}
        entries = facts.pop("tensors").items()
        records = {name: Record.read(require_record(entry, sizes)) for name, entry in entries}
        require_facts(facts, records)
    except WRONG as error:
        raise _damaged(path, f"the facts of a checkpoint, version {VERSION}", error) from error
    _require_files(directory, sizes)
    return facts, records


def read_tensors(directory: Path, records: Records) -> dict[str, torch.Tensor]:
    """Read tensors into host memory, each compared with its checksum."""
    tensors = {name: record.empty() for name, record in records.items()}
    for file in sorted({record.file for record in records.values()}):
        in_file = {name: record for name, record in records.items() if record.file == file}
        try:
            with _plainly():
                load(
                    {name: tensors[name] for name in in_file}, storage_reader=_Reader(directory, in_file), no_dist=True
                )
        except Exception as error:
            # torch's own message advises to let the file run code.
            came = error if isinstance(error, OSError) else f"what torch does not read ({type(error).__name__})"
            raise _damaged(directory / file, "tensors that can be read", came) from None
        for name, record in in_file.items():
            if zlib.crc32(raw(tensors[name])) != record.crc:
                raise _damaged(directory / file, f"{name} as it was written", "other values: its checksum differs")
    return tensors


def _metadata(records: Records) -> Metadata:
    """Return torch's own index."""
    tensors, places = {}, {}
    for name, record in records.items():
        origin, size = torch.Size([0] * len(record.shape)), torch.Size(record.shape)
        properties = TensorProperties(dtype=dtype_of(record.dtype))
        tensors[name] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(origin, size)])
        places[MetadataIndex(name, origin)] = _StorageInfo(record.file, record.offset, record.length)
    return Metadata(dict(tensors), planner_data={name: (name,) for name in records}, storage_data=places)


def _require_files(directory: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file():
            raise _damaged(path, "a file of this checkpoint", "nothing there")
        if path.stat().st_size < size:
            raise _damaged(path, f"{size} bytes", f"{path.stat().st_size}")


def _by_end(records: Records) -> list[Record]:
    return sorted(records.values(), key=lambda record: record.offset)


def _checksum(facts: Any) -> int:
    return zlib.crc32(json.dumps(facts).encode())


def _damaged(path: Path, expected: str, came: object) -> FormatError:
    shown = f"{type(came).__name__}: {came}" if isinstance(came, BaseException) else came
    return FormatError(str(path), expected, shown, "the checkpoint is damaged: use another one")


@contextmanager
def _plainly() -> Iterator[None]:
    """Call torch inside: raise the original error instead of torch's wrapper, without its warning about one process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:  # no Exception, in torch's tree
        raise _cause(next(iter(error.failures.values()))[0]) from None


def _cause(error: BaseException) -> BaseException:
    """Return the system's error behind one of torch's: on a full disk torch reports a wrong position."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause
