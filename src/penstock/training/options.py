"""The options of a Pipeline: each declared, checked and described here, once.

`help(penstock.Pipeline)`, its signature and its error messages are made from these fields. To add an option, add a
field with its text and, where a wrong value can be refused at once, its check (option_checks.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import cleandoc
from textwrap import wrap
from typing import Annotated, Any, TypeVar

import torch
from torch import nn

from penstock.comm.transport.open import requested_transport
from penstock.core.arguments import Option, check_options, options_of
from penstock.core.cost import Costs
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.core.validation import Numbers, truth
from penstock.errors import InputError
from penstock.model.materialise import read_later
from penstock.model.offload import Offload
from penstock.schedules.registry import METHODS
from penstock.training.option_checks import (
    check_accumulate,
    check_clip,
    check_cuts,
    check_data,
    check_example,
    check_load,
    check_loss,
    check_lr_scheduler,
    check_model,
    check_precision,
    check_replicas,
    check_schedule,
    check_seed,
    check_shard,
    check_timeout,
    read_recompute,
)

LossFunction = Callable[[Any, Any], Any]
WeightSource = Callable[[str], torch.Tensor] | str | os.PathLike[str]


class _NotGiven:
    def __repr__(self) -> str:
        return "(not given)"


NOT_GIVEN: Any = _NotGiven()


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a Pipeline, as the user gave them.

    Fields without a text are options of schedules, which schedules/registry.py describes.
    """

    model: Annotated[
        nn.Module | Sequence[nn.Module],
        Option("The model, which the Pipeline cuts into stages; or a list of modules, one a stage.", check_model),
    ] = field(kw_only=False)
    example: Annotated[
        Any, Option("A small batch of the model's inputs: a tensor, a tuple of arguments or a dict.", check_example)
    ]
    stages: Annotated[int | None, Option("Number of pipeline ranks; cuts, a list of modules or a plan imply it.")] = (
        None
    )
    schedule: Annotated[
        str | Schedule | Loop | None,
        Option(
            "Name of a schedule, as `penstock schedules` lists them ('1f1b'), a Schedule or a Loop.", check_schedule
        ),
    ] = None
    microbatches: Annotated[int | None, Option("Number of micro-batches that a mini-batch is cut into (4).")] = None
    loss: Annotated[
        LossFunction | None,
        Option("Function of (result, target) that returns a mean over rows, or (sum, weight).", check_loss),
    ] = None
    optimizer: Annotated[
        Callable[..., torch.optim.Optimizer] | None,
        Option("Function of (parameters) or (names, parameters) that makes an optimizer; called once for each stage."),
    ] = None
    cuts: Annotated[
        Sequence[str] | None,
        Option(
            "Names of the modules at which the second, third, ... stage begins; balanced if left out.",
            check_cuts,
            same=True,
        ),
    ] = None
    chunks: Annotated[int | None, Option("Number of stages on each rank; the schedule's own if left out.")] = None
    replicas: Annotated[
        int | Sequence[int] | None,
        Option("Number of replicas of each stage, or one number a rank; they divide micro-batches' rows (1).",
               check_replicas),
    ] = None  # fmt: skip
    shard: Annotated[
        str | None,
        Option("State that the replicas of a stage divide between them: 'optimizer', or 'gradients' too (ZeRO 1, 2).",
               check_shard, same=True),
    ] = None  # fmt: skip
    plan: Annotated[
        Any,
        Option("A Plan, what `penstock.plan` returns, or the path of its JSON, in place of stages, cuts, chunks, "
               "replicas, schedule and microbatches. Process r runs the stages on the r-th device that the plan uses."),
    ] = None  # fmt: skip
    recompute: Annotated[
        str,
        Option(
            "'never', 'except-last' or 'always': run a stage's forward again in its backward.",
            read_recompute,
            same=True,
        ),
    ] = "never"
    offload: Annotated[
        bool | str,
        Option("What waits in host memory: 'activations' (or True), 'weights' (of stages that wait) or 'all'.",
               Offload.read),
    ] = False  # fmt: skip
    precision: Annotated[
        str | None,
        Option("'bf16' or 'fp16': run forwards under autocast; fp16 scales the loss.", check_precision, same=True),
    ] = None
    clip: Annotated[
        float | None, Option("Largest norm of all gradients together; they are scaled to it.", check_clip, same=True)
    ] = None
    accumulate: Annotated[
        int, Option("Number of steps whose gradients make one update.", check_accumulate, same=True)
    ] = 1
    lr_scheduler: Annotated[
        Callable[[torch.optim.Optimizer], Any] | None,
        Option(
            "Function of (optimizer) that makes its LR scheduler, which advances at each update.", check_lr_scheduler
        ),
    ] = None
    seed: Annotated[
        int, Option("Seed of the random numbers that forwards draw, such as dropout's.", check_seed, same=True)
    ] = 0
    verify: Annotated[
        bool,
        Option("Compare the split model with the whole one on the example, and losses of micro-batches with the whole "
               "batch's.", partial(truth, "verify")),
    ] = True  # fmt: skip
    data: Annotated[
        str,
        Option(
            "'every' if each rank is given the same batches, 'rank0' if the others give None.", check_data, same=True
        ),
    ] = "every"
    transport: Annotated[
        str | None,
        Option(
            "'shared', 'gloo' or a registered transport, in place of the one chosen for processes.", requested_transport
        ),
    ] = None
    timeout: Annotated[float, Option("Seconds that a rank waits for another before it fails.", check_timeout)] = 120.0
    timeline: Annotated[
        bool, Option("Keep the times of the last steps, for `timeline()` and `measured()`.", partial(truth, "timeline"))
    ] = True
    load: Annotated[
        WeightSource | None,
        Option("Where weights come from: a safetensors file or transformers directory, or a function from a "
               "parameter's name to its tensor, which fills a model on the meta device.", check_load),
    ] = None  # fmt: skip

    t1: Annotated[
        int | None, Option("PipeMare's T1: stages with long delays start at lower rates, which rise over t1 updates.")
    ] = NOT_GIVEN
    t2: Annotated[
        float | bool | None,
        Option("PipeMare's T2: correct the weights of backwards by this decay; True for exp(-2), False for none."),
    ] = NOT_GIVEN
    t3: Annotated[int | None, Option("PipeMare's T3: train the first t3 mini-batches synchronously.")] = NOT_GIVEN
    predict: Annotated[
        str | None, Option("Run forwards on forecast weights: by the last step ('xpipe') or by momentum ('spectrain').")
    ] = NOT_GIVEN
    policy: str = NOT_GIVEN
    cap: int = NOT_GIVEN
    overlap: bool = NOT_GIVEN
    stash: bool = NOT_GIVEN
    vertical_sync: bool = NOT_GIVEN
    forward: Numbers = NOT_GIVEN
    input_grad: Numbers = NOT_GIVEN
    weight_grad: Numbers = NOT_GIVEN
    transfer: Numbers = NOT_GIVEN
    weight_grad_memory: float = NOT_GIVEN
    memory: Numbers = NOT_GIVEN
    costs: Costs = NOT_GIVEN
    placement: str = NOT_GIVEN
    effort: int = NOT_GIVEN

    def __post_init__(self) -> None:
        """Refuse wrong values, and options that do not go together; what needs the model split is checked later."""
        check_options(self)
        if not isinstance(self.model, nn.Module):
            self._check_stage_modules(list(self.model))
        if self.lr_scheduler is not None and self.optimizer is None:
            raise InputError("an optimizer for the lr_scheduler", "none", "give optimizer= too")

    def _check_stage_modules(self, modules: list[nn.Module]) -> None:
        if len(set(map(id, modules))) < len(modules) or not modules:
            raise InputError(
                "stage modules, each once", f"{len(modules)}, some of them twice", "copy it, or put both uses in one"
            )
        ranks = len(modules) // (self.chunks or 1)
        if self.stages is not None and self.stages != ranks:
            raise InputError(
                f"stages={ranks} for a list of {len(modules)} stage modules", self.stages, "leave stages out"
            )
        if self.plan is not None:
            raise InputError("one model for a plan, which cuts it", "a list of stage modules", "leave out either")

    def agreed(self) -> dict[str, Any]:
        """Return the options that all ranks must have alike."""
        values = {name: getattr(self, name) for name, option in options_of(type(self)).items() if option.same}
        return values | {"cuts": None if self.cuts is None else list(self.cuts)}

    @property
    def method_options(self) -> dict[str, Any]:
        """The options of the schedule's method and of staleness mitigation that were given."""
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.default is NOT_GIVEN}
        return {name: value for name, value in values.items() if value is not NOT_GIVEN}

    @property
    def weights_path(self) -> str | os.PathLike[str] | None:
        """The file or directory to load weights from, if `load` is one."""
        return self.load if isinstance(self.load, (str, os.PathLike)) else None

    @property
    def weight_source(self) -> Callable[[str], torch.Tensor] | None:
        """The function that fills a model without weights."""
        return read_later if isinstance(self.load, (str, os.PathLike)) else self.load


Documented = TypeVar("Documented")


def document_options(described: type[Documented]) -> type[Documented]:
    """Add every option with its text to the docstring of a class, for `help()`."""
    lines = []
    for name, option in options_of(PipelineOptions).items():
        lines += wrap(f"{name}: {option.text or _method_text(name)}", 110, subsequent_indent="    ")
    described.__doc__ = f"{cleandoc(described.__doc__ or '')}\n\nOptions:\n\n" + "\n".join(lines) + "\n"
    return described


def _method_text(name: str) -> str:
    """Return the text of a schedule's option, with the names of the schedules that have it."""
    texts: dict[str, list[str]] = {}
    for method in METHODS.values():
        if name in method.options:
            texts.setdefault(method.options[name], []).append(method.name)
    return "; ".join(f"(schedule {', '.join(names)}) {text}" for text, names in texts.items())
