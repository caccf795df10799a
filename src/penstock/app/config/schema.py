"""The sections of a config with their keys, types and defaults; and the faults of a config, reported all at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.app.config.import_path import SHAPE
from penstock.errors import FormatError

LONGEST = 60  # characters of a value that a message repeats


@dataclass(frozen=True)
class ConfigFault:
    """A fault: the dotted key, what was expected, what came, and what to do where that is not obvious."""

    path: str
    expected: str
    came: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, but got {self.came}" + (f"; {self.do}" if self.do else "")


def shown(value: Any) -> str:
    """Return a value approximately as a TOML file would write it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def unknown_key(name: str, section: str, homes: dict[str, set[str]]) -> ConfigFault:
    """Return the fault for an unknown key, with the most similar one or the section that it belongs to."""
    path = f"{section}.{name}" if section else name
    do = suggestion(name, homes[section])
    home = next((home for home, keys in homes.items() if name in keys and home != section), None)
    if home is not None:
        do = f"it belongs in [{home}]" if home else f"write it as [{name}]"
    return ConfigFault(path, f"a key of [{section}]" if section else "a section", "an unknown one", do)


def suggestion(name: str, names: set[str]) -> str:
    """Return a suggestion of the most similar name, or of all names."""
    near = get_close_matches(name, sorted(names), n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(names))}"


def raise_faults(where: str, faults: list[ConfigFault]) -> None:
    """Raise one error for all faults."""
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
FilePath = Annotated[str, Field(min_length=1, description="a path")]


class Section(BaseModel):
    # Strict: "4" is no number. Names may begin with model_.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class GPTModel(Section):
    """The built-in GPT."""

    kind: Annotated[Literal["gpt"], Field(description='"gpt", or factory = "package.module:function" in its place')]
    width: Count
    heads: Count
    layers: Count
    length: Count
    dropout: Annotated[float, Field(ge=0, lt=1, description="a share of at least 0 and below 1")] = 0.0
    vocab: Count | None = None  # default: the data's


class GivenModel(Section):
    """A model from a user's function."""

    factory: Function
    arguments: Arguments = {}


class TextSource(Section):
    """Text from a file, or from Python's manual."""

    kind: Annotated[
        Literal["text"], Field(description='"text" or "digits", or factory = "package.module:function" in its place')
    ] = "text"
    path: Annotated[str | None, Field(min_length=1, description="the path of a text file")] = None
    tokens: Annotated[Literal["characters", "bytes"], Field(description='"characters" or "bytes"')] = "characters"
    length: Count | None = None  # default: the model's
    validation: Share | None = None  # held out


class DigitsSource(Section):
    """scikit-learn's handwritten digits."""

    kind: Literal["digits"]
    validation: Share | None = None


class GivenSource(Section):
    """Batches from a user's function."""

    factory: Function
    arguments: Arguments = {}
    validation: Function | None = None  # returns the held-out batches, with the same arguments


def _replicas(value: Any) -> Any:
    """Return a count of replicas, or a list of one for each rank."""
    counts = value if isinstance(value, list) else [value]
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise ValueError(value)
    return value


class PipelineSection(Section):
    stages: Count
    replicas: Annotated[
        int | list[int],
        PlainValidator(_replicas),
        Field(description="a whole number of at least 1, or a list of one for each rank"),
    ] = 1
    schedule: Annotated[str, Field(description="the name of a schedule")] = "1f1b"
    options: Annotated[dict[str, Any], Field(description="a table of the schedule's options")] = {}
    microbatches: Count = 4
    chunks: Count | None = None
    cuts: Annotated[
        list[str] | None, Field(description="a list of the modules at which the second, third, ... piece begins")
    ] = None
    plan: FilePath | None = None  # replaces the seven above
    recompute: Annotated[
        Literal["never", "except-last", "always"], Field(description='"never", "except-last" or "always"')
    ] = "never"
    shard: Annotated[Literal["optimizer", "gradients"] | None, Field(description='"optimizer" or "gradients"')] = (
        None  # what replicas divide between them
    )
    precision: Annotated[Literal["bf16", "fp16"] | None, Field(description='"bf16" or "fp16"')] = None
    clip: Positive | None = None
    seed: Whole = 0
    timeout: Positive | None = None  # seconds that a rank waits for another

    @property
    def counts(self) -> list[int]:
        """The replicas of every rank."""
        return self.replicas if isinstance(self.replicas, list) else [self.replicas] * self.stages

    @property
    def workers(self) -> int:
        """The processes of the pipeline: one for every replica of every rank."""
        return sum(self.counts)


def as_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return a section's keys as arguments, with lists as the tuples that torch expects."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


class ClassSection(Section):
    """A class of torch by its name; every other key is an argument of it."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: Annotated[str, Field(description="the name of a class")]

    @property
    def arguments(self) -> dict[str, Any]:
        return as_arguments(self.model_extra or {})


class OptimizerSection(ClassSection):
    name: Annotated[str, Field(description='the name of an optimizer in torch.optim, or "muon", "nesterov"')] = "AdamW"
    scheduler: ClassSection | None = None


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
    plain_steps: Whole = 5  # steps of one plain process, timed for comparison
    report: FilePath | None = None
    checkpoint: FilePath | None = None
    checkpoint_every: Count | None = None
    keep: Count | None = None  # number of newest checkpoints to keep; default: all
    resume: FilePath | None = None  # a checkpoint, or "auto" for the newest of this run, if there is one


class Config(Section):
    model: GPTModel | GivenModel
    data: TextSource | DigitsSource | GivenSource
    pipeline: PipelineSection
    optimizer: OptimizerSection
    training: TrainingSection


@dataclass
class ParsedConfig:
    """The valid parts of a config: whole sections, and single values by dotted key; and all faults."""

    sections: dict[str, Section] = field(default_factory=dict)
    good: dict[str, Any] = field(default_factory=dict)
    faults: list[ConfigFault] = field(default_factory=list)


def read_sections(raw: dict[str, Any]) -> ParsedConfig:
    """Parse every section separately, so that faults in one do not hide those in another."""
    parsed = ParsedConfig(faults=[unknown_key(name, "", HOMES) for name in raw if name not in Config.model_fields])
    for name in Config.model_fields:
        given = raw.get(name, {})
        if not isinstance(given, dict):
            parsed.faults.append(ConfigFault(name, f"a section [{name}]", shown(given)))
            continue
        kind, bad = _kind(name, given), set()
        try:
            parsed.sections[name] = kind.model_validate(given)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            parsed.faults += [_fault(name, kind, detail) for detail in details]
            bad = {str(detail["loc"][0]) for detail in details if not _lacks(detail)}
        usual = {key: info.default for key, info in kind.model_fields.items() if not info.is_required()}
        parsed.good |= {f"{name}.{key}": value for key, value in (usual | given).items() if key not in bad}
    return parsed


def _lacks(detail: ErrorDetails) -> bool:
    """Whether a key is missing within a value, the rest of which can be checked."""
    return detail["type"] == "missing" and len(detail["loc"]) > 1


def _kind(name: str, given: dict[str, Any]) -> type[Section]:
    """Return the variant of a section."""
    if name == "model":
        return GivenModel if "factory" in given else GPTModel
    if name == "data":
        return GivenSource if "factory" in given else DigitsSource if given.get("kind") == "digits" else TextSource
    only = Config.model_fields[name].annotation
    assert isinstance(only, type)
    return only


def _fault(section: str, kind: type[Section], detail: ErrorDetails) -> ConfigFault:
    """Return a pydantic error as a fault."""
    *outer, last = detail["loc"]
    path = section
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    if detail["type"] == "extra_forbidden":
        return unknown_key(str(last), section, HOMES)
    if outer and kind is OptimizerSection and outer[0] == "scheduler":
        kind, outer = ClassSection, outer[1:]
    expected = _expected(kind.model_fields[str(outer[0] if outer else last)]) or f"a section [{path}]"
    if detail["type"] == "missing":
        return ConfigFault(path, expected, "nothing", "add it")
    return ConfigFault(path, expected, shown(detail["input"]))


def _expected(info: FieldInfo) -> str | None:
    """Return a field's description: its own, or that of the type in a union with None."""
    if info.description:
        return info.description
    inner = [mark for part in get_args(info.annotation) for mark in getattr(part, "__metadata__", ())]
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
