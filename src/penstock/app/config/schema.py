"""The sections of a config, their keys, types and defaults; and the faults that are found in one, all at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.app.config.import_path import SHAPE
from penstock.errors import FormatError

LONGEST = 60  # signs of a value that a message repeats


@dataclass(frozen=True)
class Fault:
    """A dotted key, what was expected there, what came, and what to do where that is not plain."""

    path: str
    expected: str
    came: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, but got {self.came}" + (f"; {self.do}" if self.do else "")


def shown(value: Any) -> str:
    """A value as a TOML file would have it, or nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def unknown_key(name: str, section: str, homes: dict[str, set[str]]) -> Fault:
    """A key that is none: with the nearest right one, or the section it belongs to."""
    path = f"{section}.{name}" if section else name
    do = nearest(name, homes[section])
    home = next((home for home, keys in homes.items() if name in keys and home != section), None)
    if home is not None:
        do = f"it belongs in [{home}]" if home else f"write it as [{name}]"
    return Fault(path, f"a key of [{section}]" if section else "a section", "an unknown one", do)


def nearest(name: str, known: set[str]) -> str:
    """What may have been meant."""
    near = get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(known))}"


def require_none(where: str, faults: list[Fault]) -> None:
    """One error for all faults."""
    if len(faults) == 1:
        fault = faults[0]
        do = fault.do or "correct it"
        raise FormatError(f"{where}: {fault.path}", fault.expected, fault.came, do)
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise FormatError(where, "a config without faults", f"{len(faults)} of them", f"correct each:{lines}")


Count = Annotated[int, Field(ge=1, description="a whole number of at least 1")]
Whole = Annotated[int, Field(ge=0, description="a whole number of at least 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above 0")]
Function = Annotated[str, Field(pattern=SHAPE, description='a function, as "package.module:function"')]
Arguments = Annotated[dict[str, Any], Field(description="a table of the function's arguments")]
Share = Annotated[float, Field(gt=0, lt=1, description="a share above 0 and below 1")]
Words = Annotated[str, Field(min_length=1, description="a path")]


class Section(BaseModel):
    # Strict: "4" is no number. Names that begin with model_ are as good as others.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class GPTModel(Section):
    kind: Annotated[Literal["gpt"], Field(description='"gpt", or factory = "package.module:function" in its place')]
    width: Count
    heads: Count
    layers: Count
    length: Count
    dropout: Annotated[float, Field(ge=0, lt=1, description="a share of at least 0 and below 1")] = 0.0
    vocab: Count | None = None  # that of the data


class GivenModel(Section):
    factory: Function
    arguments: Arguments = {}


class TextSource(Section):
    kind: Annotated[
        Literal["text"], Field(description='"text" or "digits", or factory = "package.module:function" in its place')
    ] = "text"
    path: Annotated[str | None, Field(min_length=1, description="the path of a text file")] = None
    tokens: Annotated[Literal["characters", "bytes"], Field(description='"characters" or "bytes"')] = "characters"
    length: Count | None = None  # that of the model
    validation: Share | None = None  # that is held out


class DigitsSource(Section):
    kind: Literal["digits"]
    validation: Share | None = None


class GivenSource(Section):
    factory: Function
    arguments: Arguments = {}
    validation: Function | None = None  # that gives the held-out batches, from the same arguments


class PipelineSection(Section):
    stages: Count
    schedule: Annotated[str, Field(description="the name of a schedule")] = "1f1b"
    options: Annotated[dict[str, Any], Field(description="a table of the schedule's options")] = {}
    microbatches: Count = 4
    chunks: Count | None = None
    cuts: Annotated[
        list[str] | None, Field(description="a list of the modules at which the second, third, ... piece begins")
    ] = None
    plan: Words | None = None  # in place of the six above
    recompute: Annotated[
        Literal["never", "except-last", "always"], Field(description='"never", "except-last" or "always"')
    ] = "never"
    precision: Annotated[Literal["bf16", "fp16"] | None, Field(description='"bf16" or "fp16"')] = None
    clip: Positive | None = None
    seed: Whole = 0
    timeout: Positive | None = None  # seconds that a rank waits for another


def as_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Lists become the tuples that torch writes them as."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


class Chosen(Section):
    """A class of torch's by its name; every other key is an argument of it."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: Annotated[str, Field(description="the name of a class")]

    @property
    def arguments(self) -> dict[str, Any]:
        return as_arguments(self.model_extra or {})


class OptimizerSection(Chosen):
    name: Annotated[str, Field(description='the name of an optimizer in torch.optim, or "muon", "nesterov"')] = "AdamW"
    scheduler: Chosen | None = None


class TrainingSection(Section):
    steps: Count
    batch: Count
    loss: Annotated[
        str,
        Field(
            pattern=rf"^(cross-entropy|mse)$|{SHAPE}",
            description='"cross-entropy", "mse", or a function, as "package.module:function"',
        ),
    ] = "cross-entropy"
    log_every: Count = 10
    sample: Whole = 0  # tokens of text that the model writes at the end
    plain_steps: Whole = 5  # that one plain process is timed for, to compare with
    report: Words | None = None
    checkpoint: Words | None = None
    checkpoint_every: Count | None = None
    keep: Count | None = None  # the newest checkpoints, of those of this run; all unless said
    resume: Words | None = None  # a checkpoint, or "auto": the newest of this run, if there is one


class Config(Section):
    model: GPTModel | GivenModel
    data: TextSource | DigitsSource | GivenSource
    pipeline: PipelineSection
    optimizer: OptimizerSection
    training: TrainingSection


@dataclass
class Reading:
    """What could be understood of a config: whole sections, single values by dotted key, and all faults."""

    sections: dict[str, Section] = field(default_factory=dict)
    good: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def read_sections(raw: dict[str, Any]) -> Reading:
    """Every section by itself, so that one's faults do not hide another's."""
    found = Reading(faults=[unknown_key(name, "", HOMES) for name in raw if name not in Config.model_fields])
    for name in Config.model_fields:
        given = raw.get(name, {})
        if not isinstance(given, dict):
            found.faults.append(Fault(name, f"a section [{name}]", shown(given)))
            continue
        kind, bad = _kind(name, given), set()
        try:
            found.sections[name] = kind.model_validate(given)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            found.faults += [_fault(name, kind, detail) for detail in details]
            bad = {str(detail["loc"][0]) for detail in details if not _lacks(detail)}
        usual = {key: known.default for key, known in kind.model_fields.items() if not known.is_required()}
        found.good |= {f"{name}.{key}": value for key, value in (usual | given).items() if key not in bad}
    return found


def _lacks(detail: ErrorDetails) -> bool:
    """Something within a value, the rest of which can be looked at."""
    return detail["type"] == "missing" and len(detail["loc"]) > 1


def _kind(name: str, given: dict[str, Any]) -> type[Section]:
    """Which of its forms a section has."""
    if name == "model":
        return GivenModel if "factory" in given else GPTModel
    if name == "data":
        return GivenSource if "factory" in given else DigitsSource if given.get("kind") == "digits" else TextSource
    only = Config.model_fields[name].annotation
    assert isinstance(only, type)
    return only


def _fault(section: str, kind: type[Section], detail: ErrorDetails) -> Fault:
    """One of pydantic's findings in our words."""
    *outer, last = detail["loc"]
    path = section
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    if detail["type"] == "extra_forbidden":
        return unknown_key(str(last), section, HOMES)
    if outer and kind is OptimizerSection and outer[0] == "scheduler":
        kind, outer = Chosen, outer[1:]
    expected = _expected(kind.model_fields[str(outer[0] if outer else last)]) or f"a section [{path}]"
    if detail["type"] == "missing":
        return Fault(path, expected, "nothing", "add it")
    return Fault(path, expected, shown(detail["input"]))


def _expected(known: FieldInfo) -> str | None:
    """A field's description: its own, or that of the type it may have instead of None."""
    if known.description:
        return known.description
    inner = [mark for part in get_args(known.annotation) for mark in getattr(part, "__metadata__", ())]
    return next((mark.description for mark in inner if isinstance(mark, FieldInfo) and mark.description), None)


HOMES: dict[str, set[str]] = {"": set(Config.model_fields)} | {
    name: {key for kind in kinds for key in kind.model_fields}
    for name, kinds in {
        "model": (GPTModel, GivenModel),
        "data": (TextSource, DigitsSource, GivenSource),
        "pipeline": (PipelineSection,),
        "optimizer": (OptimizerSection,),
        "training": (TrainingSection,),
    }.items()
}
