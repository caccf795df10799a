"""Safetensors files, written by several ranks at once and read in part, and the files of transformers beside them.

Such a file is a header, which lists the type, shape and place of every tensor, and then their bytes. When all ranks
know the header, each writes its own tensors. Nothing here imports transformers: a model of theirs has done so.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from penstock.errors import FormatError, InputError
from penstock.training.checkpoint.atomic import sync
from penstock.training.processes import raw

TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
NAMES = {name: word for word, name in TYPES.items()}
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST = 1 << 30  # bytes that are written at once
AGAIN = "write it anew, or use another one"


@dataclass(frozen=True)
class Form:
    """The type and the shape of a tensor, the type by torch's name."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Form:
        """Return the form of a tensor; raise for one that a safetensors file cannot hold."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in NAMES or tensor.layout is not torch.strided:
            came = dtype if dtype not in NAMES else f"a tensor of layout {tensor.layout}"
            raise InputError(
                f"a type that a safetensors file can hold for {name}", came, "convert it before the export"
            )
        return Form(dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class FileLayout:
    """Places of all tensors in a new file, wider types first, so that each is aligned."""

    def __init__(self, forms: dict[str, Form]) -> None:
        self.at: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(forms, key=lambda name: (-getattr(torch, forms[name].dtype).itemsize, name)):
            form, self.at[name] = forms[name], end
            end += form.bytes
            header[name] = {
                "dtype": NAMES[form.dtype],
                "shape": list(form.shape),
                "data_offsets": [self.at[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.size = len(self.head) + end

    def begin(self, path: Path) -> None:
        """Make the file with its full size, so that a full disk is noticed now."""
        with path.open("xb") as file:
            file.write(self.head)
            file.flush()
            try:
                os.posix_fallocate(file.fileno(), 0, self.size)
            except (OSError, AttributeError) as error:  # a file system or a system without this call
                if isinstance(error, OSError) and error.errno not in _NO_SUCH_CALL:
                    raise
                file.truncate(self.size)

    def write(self, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write some tensors at their places, one after the other, and wait until they are on the disk."""
        if not path.is_file():
            raise FileNotFoundError(
                2, "no such file on this host, and all hosts have to share its directory", str(path)
            )
        with path.open("r+b", buffering=0) as file:
            for name, tensor in tensors:
                data, at = raw(tensor), len(self.head) + self.at[name]
                while data:
                    done = os.pwrite(file.fileno(), data[:MOST], at)
                    data, at = data[done:], at + done
        sync(path)


class Weights:
    """The tensors of a file, or of the files in a transformers directory; only headers are read at first."""

    def __init__(self, path: Path) -> None:
        self.files: dict[Path, Any] = {}
        self.forms: dict[str, Form] = {}
        self.file_of: dict[str, Path] = {}
        for file, names in _files(path).items():
            self._open(file, names)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into memory of its own."""
        file = self.file_of[name]
        try:
            tensor: torch.Tensor = self.files[file].get_tensor(name).clone()
        except SafetensorError as error:
            raise FormatError(str(file), f"{name} to be readable", error, AGAIN) from None
        return tensor

    def _open(self, file: Path, names: set[str] | None) -> None:
        if not file.is_file():
            raise FormatError(str(file), "a safetensors file", "nothing there", "check the path")
        try:
            opened: Any = safe_open(file, framework="pt", device="cpu")
            self.files[file] = opened
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
            forms = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        except (SafetensorError, ValueError, OverflowError) as error:
            raise FormatError(str(file), "a safetensors file", error, AGAIN) from None
        for name in names or ():
            if name not in forms:
                raise FormatError(str(file), f"{name}, which {INDEX} says is there", "a file without it", AGAIN)
        for name, (word, shape) in forms.items():
            if name in self.forms:
                raise FormatError(str(file), f"{name} in one file", f"another in {self.file_of[name].name}", AGAIN)
            self.forms[name], self.file_of[name] = Form(TYPES.get(word, word), shape), file


_NO_SUCH_CALL = (22, 38, 95)  # EINVAL, ENOSYS, EOPNOTSUPP: Linux's and macOS's differ in the last, where it is absent


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Return the files to read, with the names of tensors that an index lists for each."""
    if not path.is_dir() or (path / FILE).is_file():
        return {path / FILE if path.is_dir() else path: None}
    index = path / INDEX
    if not index.is_file():
        came = f"a directory without {FILE} and {INDEX}"
        raise FormatError(str(path), "a safetensors file, or a directory with one", came, "check the path")
    files: dict[Path, set[str] | None] = {}
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in places.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"a file outside the directory, {file!r}")
            names = files.setdefault(path / file, set())
            assert names is not None
            names.add(name)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(
            str(index), "an index of safetensors files", f"{type(error).__name__}: {error}", AGAIN
        ) from None
    return files


CONFIG, GENERATION = "config.json", "generation_config.json"
FILES = (CONFIG, GENERATION)


def pretrained_files(model: nn.Module) -> dict[str, str] | None:
    """Return files by name as `save_pretrained` writes them, or None for a model that is not transformers'."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtype = str(model.dtype).removeprefix("torch.")
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)  # the older name is of 4.55
    files = {CONFIG: config.to_json_string()}
    if model.can_generate() and model.generation_config is not None:
        files[GENERATION] = model.generation_config.to_json_string()
    return files
