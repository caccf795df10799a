"""The task of a config: the model, its data, loss and optimizer, and the Pipeline that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.app.config.data import Batch, Data, GivenData, TextData, built_in_text, digits, read_text
from penstock.app.config.import_path import call_function, import_function
from penstock.app.config.schema import Config, DigitsSource, GivenModel, GivenSource, GPTModel, PipelineSection
from penstock.errors import FormatError
from penstock.model import tree
from penstock.model.batch import as_call, piece, rows_of, spans
from penstock.models.gpt import GPT
from penstock.training.optimizers import OPTIMIZERS, takes_names
from penstock.training.pipeline import Pipeline
from penstock.training.staleness import NAMES as MITIGATIONS

USUAL_LENGTH = 64  # length of texts for a model without a length


def cross_entropy(result: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of class scores in the last dimension, with one target for each row or token."""
    return F.cross_entropy(result.flatten(0, -2), target.flatten())


LOSSES: dict[str, Callable[[Any, Any], Any]] = {"cross-entropy": cross_entropy, "mse": F.mse_loss}


@dataclass(frozen=True)
class Task:
    """A config's model, data and pipeline, the same in every process; in double precision if requested."""

    config: Config
    double: bool = False

    @property
    def precision(self) -> str | None:
        return None if self.double else self.config.pipeline.precision

    @cached_property
    def data(self) -> Data:
        section, training, seed = self.config.data, self.config.training, self.config.pipeline.seed
        if isinstance(section, GivenSource):
            make, held_out = section.factory, section.validation
            return GivenData(
                self._given(section, "factory", make),
                None if held_out is None else self._given(section, "validation", held_out),
            )
        if isinstance(section, DigitsSource):
            return digits(training.batch, seed, section.validation)
        as_bytes = section.tokens == "bytes"
        text: str | bytes = built_in_text() if section.path is None else read_text(section.path, as_bytes)
        if isinstance(text, str) and as_bytes:
            text = text.encode()
        return TextData(text, training.batch, section.length or self._length, seed, section.validation)

    @staticmethod
    def _given(section: GivenSource, key: str, function: str) -> Callable[[], Any]:
        """Return the user's data function, bound to the config's arguments."""
        make = import_function(f"data.{key}", function)
        return lambda: call_function("data", make, section.arguments)

    @property
    def _length(self) -> int:
        model = self.config.model
        return model.length if isinstance(model, GPTModel) else USUAL_LENGTH

    def model(self) -> nn.Module:
        """Return the model with its initial weights, the same each time."""
        section = self.config.model
        torch.manual_seed(self.config.pipeline.seed)
        if isinstance(section, GivenModel):
            built = call_function("model", import_function("model.factory", section.factory), section.arguments)
            if not isinstance(built, nn.Module):
                expected = "a function that makes an nn.Module"
                raise FormatError("model.factory", expected, type(built).__name__, "return one")
            return built.double() if self.double else built
        tokens = section.vocab or self.data.vocab
        assert tokens is not None  # ensured by the config's rules
        if self.data.vocab is not None and tokens < self.data.vocab:
            raise FormatError("model.vocab", f"at least the data's {self.data.vocab} tokens", tokens, "leave it out")
        given = {name: getattr(section, name) for name in ("width", "heads", "layers", "length", "dropout")}
        model = GPT(vocab=tokens, **given)
        return model.double() if self.double else model

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        name = self.config.training.loss
        return LOSSES[name] if name in LOSSES else import_function("training.loss", name)

    def optimizer(self, names: Sequence[str], params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        section = self.config.optimizer
        kind = OPTIMIZERS[section.name] if section.name in OPTIMIZERS else getattr(torch.optim, section.name)
        named = {"names": names} if takes_names(section.name) else {}
        try:
            optimizer: torch.optim.Optimizer = kind(params, **section.arguments, **named)
        except ValueError as error:  # the values were checked with the config, but not with these weights
            expected, came = "an optimizer that takes all weights of a stage", f"{section.name} ({error})"
            raise FormatError("optimizer.name", expected, came, self._other_optimizer) from None
        return optimizer

    @property
    def _other_optimizer(self) -> str:
        other = self.config.optimizer.name.lower()
        return f'write "{other}", which has AdamW for the rest' if other == "muon" else "choose another"

    @property
    def scheduler(self) -> Callable[[torch.optim.Optimizer], Any] | None:
        section = self.config.optimizer.scheduler
        if section is None:
            return None
        return lambda optimizer: getattr(torch.optim.lr_scheduler, section.name)(optimizer, **section.arguments)

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Yield `count` batches, from number `first` on."""
        source = self.data.batches(first)
        for _ in range(count):
            inputs, target = next(source)
            yield self._typed(inputs), self._typed(target)

    def validation(self) -> Iterator[Batch]:
        """Yield the held-out batches."""
        for inputs, target in self.data.validation():
            yield self._typed(inputs), self._typed(target)

    def _typed(self, value: Any) -> Any:
        return tree.replace(value, lambda t: t.double() if t.is_floating_point() else t) if self.double else value

    def pipeline(self, optimizer: Callable[..., torch.optim.Optimizer] | None = None, verify: bool = True) -> Pipeline:
        """Return the pipeline, with one micro-batch as its example."""
        section, (inputs, target) = self.config.pipeline, next(self.batches(0, 1))
        rows = rows_of(as_call(inputs), target)
        optional: dict[str, Any] = {} if section.timeout is None else {"timeout": section.timeout}
        return Pipeline(
            self.model(),
            example=piece(inputs, *spans(rows, section.microbatches)[0]),
            shard=section.shard,
            recompute=section.recompute,
            precision=self.precision,
            clip=section.clip,
            seed=section.seed,
            loss=self.loss,
            optimizer=optimizer or self.optimizer,
            lr_scheduler=self.scheduler,
            verify=verify,
            **optional,
            **_schedule_options(section),
        )


def _schedule_options(section: PipelineSection) -> dict[str, Any]:
    """Return the arguments that choose the schedule; a plan's file replaces all but the staleness mitigation."""
    if section.plan is not None:
        mitigation = {name: value for name, value in section.options.items() if name in MITIGATIONS}
        return {"plan": section.plan, **mitigation}
    names = ("stages", "replicas", "schedule", "microbatches", "cuts", "chunks")
    return {name: getattr(section, name) for name in names} | section.options
