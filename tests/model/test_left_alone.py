"""Whatever looks at a model, measures it or refuses it leaves it, and the process around it, as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from zoo import WIDTH, ZOO, Block, Of, floats, language_model, score, words

import penstock
from fingerprint import differences, fingerprint
from penstock import InputError


class Busy(Block):
    """Counts, draws from every source, and keeps an average, a table, a log and a hook."""

    def __init__(self):
        super().__init__()
        self.calls, self.log, self.table, self.drop = 0, [], np.zeros(2), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        if not self.calls:
            self.down.register_forward_hook(self.note)
            self.up.register_forward_pre_hook(lambda module, args: None)
            self.up.register_full_backward_hook(lambda module, given, made: None)
        self.calls += 1
        self.log.append({"calls": self.calls})
        self.table[0] += random.random() + np.random.rand()
        with torch.no_grad():
            self.average.add_(x.mean(0).sum())
        return self.drop(super().forward(x))

    def note(self, module, args, result):
        self.log.append(tuple(result.shape))


def busy():
    def through(m, x):
        for one in m.blocks:
            x = one(x)
        return x

    return Of(through, blocks=nn.ModuleList(Busy() for _ in range(4))).double()


def lived_in(model):
    """With what a user's model has: frozen weights, gradients, modes and hooks."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    parameters[0].requires_grad_(False)
    parameters[1].grad = torch.full_like(parameters[1], 0.25)
    parameters[2].register_hook(lambda gradient: gradient)
    modules = [*model.modules()]
    modules[-1].eval()
    modules[-2].register_forward_hook(lambda module, args, result: None)
    return model


MODELS = {
    "resnet": (ZOO["resnet"].make, ZOO["resnet"].inputs),
    "tied": (ZOO["tied"].make, ZOO["tied"].inputs),
    "busy": (busy, lambda rows, _: floats(rows, WIDTH)),
    "hidden states": (language_model("Llama", output_hidden_states=True), words),
    "attentions": (
        language_model("Llama", output_attentions=True, attn_implementation="eager", use_cache=False),
        words,
    ),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def piped(model, inputs, **asked):
    given = {"stages": 2, "microbatches": 2, "loss": score, "optimizer": sgd, **asked}
    return penstock.Pipeline(model, example=inputs, **given)


def failing(*_):
    raise ZeroDivisionError("no such luck")


def foreign(parameters):
    return sgd([nn.Parameter(torch.ones(1))])


def measured(model, inputs, **asked):
    return penstock.profile(model, inputs, loss=asked.pop("loss", score), repetitions=1, **asked)


def planned(model, inputs):
    found = penstock.plan(measured(model, inputs), penstock.read_cluster("pc"), replicas=1)
    return penstock.Pipeline(model, example=inputs, plan=found, loss=score, optimizer=sgd)


def fails_in_a_step(model, inputs, **asked):
    """The pipeline's own pass comes first: it may look, but the step is what fails."""
    pipe = piped(model, inputs, verify=False, **asked)
    for _ in range(2):
        pipe.step(inputs, torch.zeros(4))


LOOKS = {
    "pipeline": piped,
    "unverified": lambda model, inputs: piped(model, inputs, verify=False),
    "asynchronous": lambda model, inputs: piped(model, inputs, schedule="pipedream"),
    "recomputed": lambda model, inputs: piped(model, inputs, recompute="always"),
    "profile": measured,
    "profile with updates": lambda model, inputs: measured(model, inputs, optimizer=sgd),
    "estimate": lambda model, inputs: penstock.estimate(model, inputs, loss=score, device="cpu"),
    "plan": planned,
}
REFUSALS = {
    "too many stages": lambda model, inputs: piped(model, inputs, stages=1000),
    "no such cut": lambda model, inputs: piped(model, inputs, stages=None, cuts=["nowhere"]),
    "no such schedule": lambda model, inputs: piped(model, inputs, schedule="1f2b"),
    "an example that fails": lambda model, inputs: piped(model, (torch.ones(4, 77),)),
    "an optimizer that fails": lambda model, inputs: piped(model, inputs, optimizer=failing),
    "an optimizer over other weights": lambda model, inputs: piped(model, inputs, optimizer=foreign),
    "a scheduler that fails": lambda model, inputs: piped(model, inputs, lr_scheduler=failing),
    "a loss that fails in a profile": lambda model, inputs: measured(model, inputs, loss=failing),
    "an optimizer that fails in a profile": lambda model, inputs: measured(model, inputs, optimizer=failing),
    "a loss that fails in a step": lambda model, inputs: fails_in_a_step(model, inputs, loss=failing),
    "a loss of the wrong shape": lambda model, inputs: fails_in_a_step(model, inputs, loss=lambda out, t: t),
    "the same, recomputed": lambda model, inputs: fails_in_a_step(
        model, inputs, loss=lambda out, t: t, recompute="always"
    ),
}


def seeded(name):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    make, inputs = MODELS[name]
    return lived_in(make().double()), inputs(4, 6)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", MODELS)
def test_what_looks_at_a_model_leaves_it_alone(name, look):
    model, inputs = seeded(name)
    before = fingerprint(model)
    LOOKS[look](model, inputs)
    assert differences(before, fingerprint(model)) == []


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("name", MODELS)
def test_what_refuses_a_model_leaves_it_alone(name, refusal):
    model, inputs = seeded(name)
    before = fingerprint(model)
    with pytest.raises((InputError, ZeroDivisionError, RuntimeError)):
        REFUSALS[refusal](model, inputs)
    assert differences(before, fingerprint(model)) == []


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_hooks_that_a_first_forward_puts_on_are_put_on_once(recompute):
    """As many hidden states as the plain model has, in the pipeline's results and in the model's own afterwards."""
    model, inputs = seeded("hidden states")
    plain, _ = seeded("hidden states")
    wanted = len(plain(inputs).hidden_states)
    pipe = piped(model, inputs, recompute=recompute)
    for _ in range(2):
        pipe.step(inputs, None)
    assert len(pipe.forward(inputs).hidden_states) == wanted
    assert len(model(inputs).hidden_states) == wanted


def test_the_fingerprint_sees_each_kind_of_change():
    """The tests above prove nothing if it is blind."""
    changes = {
        "weight": lambda m: m.get_parameter("blocks.0.up.weight").data.add_(1e-15),
        "gradient": lambda m: setattr(
            m.get_parameter("blocks.1.up.weight"), "grad", torch.ones(2 * WIDTH, WIDTH).double()
        ),
        "frozen": lambda m: m.get_parameter("blocks.1.up.weight").requires_grad_(False),
        "another parameter": lambda m: setattr(m.blocks[1].up, "bias", nn.Parameter(m.blocks[1].up.bias.detach())),
        "buffer": lambda m: m.blocks[0].norm.running_mean.add_(1),
        "attribute": lambda m: setattr(m.blocks[0], "calls", 1),
        "log": lambda m: m.blocks[0].log.append(1),
        "hook": lambda m: m.blocks[0].register_forward_hook(lambda *_: None),
        "hook of a weight": lambda m: m.blocks[1].up.weight.register_hook(lambda g: g),
        "mode": lambda m: m.blocks[0].eval(),
        "class": lambda m: setattr(Busy, "count", 1),
        "torch's class": lambda m: setattr(nn.Module, "count", 1),
        "random": lambda m: random.random(),
        "numpy": lambda m: np.random.rand(),
        "torch": lambda m: torch.rand(1),
        "function": lambda m: setattr(random, "also", random.random),
    }
    try:
        for name, change in changes.items():
            model, _ = seeded("busy")
            before = fingerprint(model)
            change(model)
            assert differences(before, fingerprint(model)), name
    finally:
        for holder, name in ((Busy, "count"), (nn.Module, "count"), (random, "also")):
            if name in vars(holder):
                delattr(holder, name)
