"""Every option of a Pipeline is declared once: help, signature, messages and the ranks' agreement follow."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import MISSING, dataclass, fields
from typing import Annotated

import pytest
import torch
from torch import nn

import penstock
from penstock import InputError
from penstock.core.arguments import Option, check_options, options_of, takes
from penstock.errors import ArgumentError
from penstock.training.options import PipelineOptions

torch.set_num_threads(1)

HELP = pydoc.plain(pydoc.render_doc(penstock.Pipeline))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("name", [option.name for option in fields(PipelineOptions)])
def test_help_shows_every_option_with_its_text(name):
    words = re.search(rf"^ \|  {name}: (.*)$", HELP, re.MULTILINE)
    assert words is not None
    assert len(words[1].split()) >= 3
    text = options_of(PipelineOptions)[name].text
    assert " ".join(text.split()) in " ".join(re.sub(r"^ \|", "", HELP, flags=re.MULTILINE).split())


def test_the_signature_has_every_option_and_its_default():
    parameters = inspect.signature(penstock.Pipeline).parameters
    assert list(parameters) == [option.name for option in fields(PipelineOptions)]
    for option in fields(PipelineOptions):
        default = parameters[option.name].default
        assert default is (inspect.Parameter.empty if option.default is MISSING else option.default)
    assert [name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY] == ["model"]


def positive(value: float) -> None:
    if value <= 0:
        raise InputError("width to be positive", value, "correct width")


Width = Annotated[float, Option("How wide.", positive)]


def test_a_new_option_is_one_field():
    """Its signature, its check and the message for a wrong spelling follow."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        width: Width = 1.0

        def __post_init__(self) -> None:
            check_options(self)

    class Door:
        @takes(Options, others=lambda: ("colour",))
        def __init__(self, options: Options, others: dict[str, object]) -> None:
            self.options, self.others = options, others

    door = Door(width=2.0, colour="red")
    assert (door.options.width, door.others) == (2.0, {"colour": "red"})
    with pytest.raises(InputError, match="width to be positive, but got -1; correct width"):
        Door(width=-1)
    with pytest.raises(ArgumentError, match="'widht'; did you mean width"):
        Door(widht=2.0)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("recompute", "sometimes", "recompute to be one of never, except-last, always"),
        ("offload", "disk", "offload to be True, False, activations, weights or all"),
        ("precision", "fp8", "precision to be bf16 or fp16"),
        ("clip", 0, "clip to be a positive norm"),
        ("accumulate", 0, "accumulate to be at least 1 step"),
        ("data", "rank1", "data to be 'every'"),
        ("transport", "tcp", "transport= to be one of"),
        ("timeout", 0, "timeout to be a positive number"),
        ("verify", "no", "verify to be True or False"),
        ("timeline", 3, "timeline to be True or False"),
        ("seed", 1.5, "seed to be a whole number"),
        ("schedule", 3, "schedule= to be a name, or a schedule"),
        ("cuts", "blocks.4", "cuts to be a list of module names"),
        ("load", 3, "load= to be a function"),
        ("lr_scheduler", 3, "lr_scheduler= to be a function"),
        ("loss", 3, "loss= to be a function"),
    ],
)
def test_a_wrong_value_is_refused_by_the_options_check(option, value, words):
    with pytest.raises(InputError, match=words):
        penstock.Pipeline(net(), example=torch.ones(1, 2), **({"stages": 2} | {option: value}))


def test_options_of_a_method_are_those_that_were_given():
    options = PipelineOptions(net(), example=torch.ones(1, 2), stages=2, t1=None, cap=3)
    assert options.method_options == {"t1": None, "cap": 3}
    assert set(options.agreed()) >= {"cuts", "recompute", "precision", "clip", "accumulate", "seed", "data"}
