"""What an asynchronous schedule cannot do is refused with one message, before anything has changed."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock import InputError, Pipeline

torch.set_num_threads(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


STRANGER = nn.Parameter(torch.ones(2))
WHOLE = "to be a whole number of at least"

# Asked, and the words that must be in the one message: what was expected, what came, what to do.
REFUSED = [
    ({"schedule": "2bw", "microbatches": 3}, ["microbatches to be at least its depth of 4", "got 3", "use 4 or more"]),
    ({"schedule": "pipemare", "t1": 0}, [f"t1 {WHOLE} 1", "updates over which learning rates rise", "got 0"]),
    ({"schedule": "pipemare", "t1": -3}, [f"t1 {WHOLE} 1", "got -3", "correct t1"]),
    ({"schedule": "pipemare", "t1": 2.5}, [f"t1 {WHOLE} 1", "got 2.5"]),
    ({"schedule": "pipemare", "t1": True}, [f"t1 {WHOLE} 1", "got True"]),
    ({"schedule": "pipemare", "t1": "10"}, [f"t1 {WHOLE} 1", "got '10'"]),
    ({"schedule": "pipemare", "t2": 0}, ["t2 to be True, or a decay D between 0 and 1", "got 0", "correct t2"]),
    ({"schedule": "pipemare", "t2": 1}, ["a decay D between 0 and 1", "got 1"]),
    ({"schedule": "pipemare", "t2": -0.1}, ["a decay D between 0 and 1", "got -0.1"]),
    ({"schedule": "pipemare", "t2": float("nan")}, ["a decay D between 0 and 1", "got nan"]),
    ({"schedule": "pipemare", "t2": "yes"}, ["a decay D between 0 and 1", "got 'yes'"]),
    ({"schedule": "pipemare", "t3": -1}, [f"t3 {WHOLE} 0", "got -1"]),
    ({"schedule": "pipemare", "t3": 1.0}, [f"t3 {WHOLE} 0", "got 1.0"]),
    ({"schedule": "pipedream", "t2": True}, ["t2 with a schedule whose backward takes the newest", "the law 'stash'",
                                             "use pipemare"]),
    ({"schedule": "2bw", "t2": 0.2}, ["t2 with a schedule whose backward takes the newest", "'2bw'", "use pipemare"]),
    ({"schedule": "pipedream", "vertical_sync": True, "stash": False}, ["weight stashing where vertical_sync is on",
                                                                        "leave stash on"]),
    ({"schedule": "pipedream", "stash": 1}, ["stash", "True or False", "1"]),
    ({"schedule": "1f1b", "t1": 5}, ["an asynchronous schedule for t1", "got '1f1b'", "leave it out"]),
    ({"schedule": "gpipe", "predict": "xpipe", "t3": 2}, ["an asynchronous schedule for t3, predict", "got 'gpipe'"]),
    ({"schedule": "pipedream", "predct": "xpipe"},
     ["arguments that Pipeline takes", "got 'predct'", "did you mean predict?"]),
    ({"schedule": "2bw", "wheels": 4}, ["arguments that Pipeline takes", "got 'wheels'", "leave it out"]),
    ({"schedule": "pipedream", "predict": "nesterov"}, ["predict to be one of xpipe, spectrain", "got 'nesterov'"]),
    ({"schedule": "pipedream", "predict": True}, ["predict to be one of xpipe, spectrain", "got True"]),
    ({"schedule": "pipedream", "predict": ["xpipe"]}, ["predict to be one of xpipe, spectrain", "got ['xpipe']"]),
    ({"schedule": "pipedream", "predict": "spectrain"}, ["an optimizer that keeps a momentum", "got SGD with none",
                                                         "predict='xpipe'"]),
    ({"schedule": "pipedream", "optimizer": None}, ["an optimizer under an asynchronous schedule", "got none",
                                                    "give optimizer="]),
    ({"schedule": "pipedream", "optimizer": lambda params: torch.optim.SGD([*params, STRANGER], lr=0.1)},
     ["an optimizer over the parameters it was given", "got 1 that are not the stage's", "build it from the argument"]),
    ({"schedule": "pipedream", "accumulate": 2}, ["accumulate=1 under an asynchronous schedule", "got 2",
                                                  "use more micro-batches"]),
    ({"schedule": "2bw", "offload": "weights"}, ["weights that stay on their device", "got offload='weights'",
                                                 "use offload='activations'"]),
    ({"schedule": "2bw", "offload": "all"}, ["weights that stay on their device", "got offload='all'"]),
    ({"schedule": "pipedream", "stages": 2, "chunks": 2}, ["one chunk a rank for pipedream", "got 2",
                                                           "leave chunks out"]),
    ({"schedule": penstock.schedule("gpipe", stages=4, microbatches=4, batches=3)},
     ["a synchronous schedule of one mini-batch", "got 'gpipe' of 3", "give batches=1"]),
    ({"schedule": penstock.loop("pipedream", stages=3, microbatches=4)}, ["a schedule of 4 stages", "got 3"]),
    ({"schedule": penstock.loop("pipedream", stages=4, microbatches=2)}, ["a schedule of 4 micro-batches", "got 2"]),
    ({"schedule": penstock.loop("pipedream", stages=4, microbatches=4), "stash": True},
     ["no options for a schedule that is made already", "got stash"]),
    ({"schedule": "pipemare", "replicas": 2}, ["weights that are stashed where stages have replicas", "got pipemare",
                                               "use pipedream or 2bw"]),
    ({"schedule": "pipedream", "replicas": 2, "stash": False}, ["weights that are stashed", "got pipedream"]),
    ({"schedule": "pipedream", "replicas": [2, 1, 1, 1], "predict": "xpipe"},
     ["no mitigation of stale weights where stages have replicas and no flush", "xpipe", "give every stage one"]),
    ({"schedule": "pipedream", "replicas": 2, "t3": 4}, ["no mitigation of stale weights", "t3=4"]),
    ({"schedule": "pipedream", "replicas": 2, "precision": "fp16"}, ["no loss scale where", "fp16", "use bf16"]),
    ({"schedule": penstock.loop("2bw", stages=4, microbatches=4, replicas=2), "clip": 1.0},
     ["no norm over all stages, which is agreed on by the order of 2bw, where", "got clip=1.0", "leave it"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "words"), REFUSED, ids=lambda value: None if isinstance(value, list) else str(value)[:60]
)
def test_it_is_refused_when_the_pipeline_is_made(asked, words):
    made = model()
    before, random = copy.deepcopy(made.state_dict()), torch.random.get_rng_state()
    given = {"stages": 4, "microbatches": 4, "loss": F.mse_loss, "optimizer": sgd} | asked
    with pytest.raises(InputError) as caught:
        Pipeline(made, example=torch.ones(4, 3), **given)
    assert re.fullmatch(r"expected .*, but got .*; .*", str(caught.value))
    assert [word for word in words if word not in str(caught.value)] == []
    assert all(value.equal(before[name]) for name, value in made.state_dict().items())
    assert all(p.grad is None for p in made.parameters())
    assert torch.random.get_rng_state().equal(random)


def test_remedies_with_a_loop_of_the_users_own():
    """They are no options of the schedule, so they can go with it."""
    batches = [(torch.randn(4, 3), torch.randn(4, 3)) for _ in range(6)]
    found = []
    for schedule in ("pipedream", penstock.loop("pipedream", stages=4, microbatches=2)):
        pipe = Pipeline(
            model(), example=batches[0][0], stages=4, schedule=schedule, microbatches=2, loss=F.mse_loss,
            optimizer=momentum, t1=4, t3=2, predict="spectrain",
        )  # fmt: skip
        found.append([step.loss for step in pipe.train(batches)])
    assert found[0] == found[1]


def test_an_optimizer_whose_state_has_no_momentum_after_all_is_refused_at_its_first_update():
    pipe = Pipeline(
        model(), example=torch.randn(4, 3), stages=4, schedule="pipedream", microbatches=2, loss=F.mse_loss,
        optimizer=lambda params: torch.optim.Adamax(params, lr=0.1), predict="spectrain",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"an optimizer that keeps a momentum.*Adamax with .*exp_inf"):
        list(pipe.train([(torch.randn(4, 3), torch.randn(4, 3))] * 6))
    assert all(p.isfinite().all() for p in pipe.model.parameters())


def test_no_loader_and_no_loss():
    pipe = Pipeline(
        model(),
        example=torch.randn(4, 3),
        stages=4,
        schedule="pipedream",
        microbatches=1,
        loss=F.mse_loss,
        optimizer=sgd,
    )
    with pytest.raises(InputError, match="a loader, but got None"):
        list(pipe.train(None))
    pipe.loss = None
    with pytest.raises(InputError, match="a loss to train or evaluate, but got none"):
        list(pipe.train([]))
    with pytest.raises(InputError, match="a loss to train or evaluate, but got none"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3))
