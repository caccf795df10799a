"""What cannot be used is refused with one message, and the model is as it was; the pipeline then still works."""

from __future__ import annotations

import random
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plain
from penstock import InputError, Pipeline, schedule
from penstock.model.materialise import weightless

torch.set_num_threads(1)
F64 = torch.float64


def snapshot(model: nn.Module):
    return (
        plain.weights(model),
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        torch.random.get_rng_state().tolist(),
        random.getstate(),
    )


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


class Refusal:
    """Runs something that must be refused, sees that nothing has changed, and that the next step is right."""

    def __init__(self, given: plain.Case, **options) -> None:
        self.given = given
        options = {"stages": 2, "microbatches": 4, "loss": given.loss} | options
        self.pipe = Pipeline(given.fresh(), example=given.example, **options)
        plain.backward(self.pipe.model.eval(), given.loss, *given.batches[1])  # gradients that someone left there
        self.pipe.model.train()

    def of(self, error: type[BaseException], match: str, inputs, target) -> str:
        before = snapshot(self.pipe.model)
        with pytest.raises(error, match=match) as caught:
            self.pipe.step(inputs, target)
        assert same(snapshot(self.pipe.model), before)
        assert self.pipe.index == 0
        assert not any(stage.kept or stage.queues for stage in self.pipe.stages)
        return "".join(traceback.format_exception(caught.value))

    def then_works(self) -> None:
        model = self.given.fresh()
        self.pipe.model.zero_grad()
        self.pipe.step(*self.given.batches[0])
        plain.backward(model, self.given.loss, *self.given.batches[0], 4 if self.given.by_parts else 1)
        assert plain.off(plain.gradients(self.pipe.model), plain.gradients(model)) < 1e-12


@pytest.fixture(params=["mlp", "conv"])
def refusal(request) -> Refusal:
    return Refusal(plain.case(request.param))


def test_an_empty_batch(refusal):
    x, y = refusal.given.batches[0]
    refusal.of(InputError, "a batch with rows, but got an empty one", x[:0], y[:0])
    refusal.then_works()


def test_no_tensor_at_all(refusal):
    refusal.of(InputError, "at least one tensor that has rows", (), None)
    refusal.then_works()


def test_inputs_and_targets_of_different_batch_sizes(refusal):
    x, y = refusal.given.batches[0]
    refusal.of(InputError, r"same number of rows, but got \[7, 8\]", x, y[:7])
    refusal.then_works()


def test_two_inputs_of_different_batch_sizes():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, y):
            return self.b(self.a(x)) + y

    x = torch.randn(8, 6)
    pipe = Pipeline(Two(), example=(x[:2], x[:2]), stages=2, loss=F.mse_loss)
    with pytest.raises(InputError, match=r"same number of rows, but got \[5, 8\]"):
        pipe.step((x, x[:5]), x)
    with pytest.raises(InputError, match=r"same number of rows, but got \[5, 8\]"):
        pipe.forward((x, x[:5]))
    pipe.step((x, x), x)


def test_an_input_on_the_wrong_device(refusal):
    x, y = refusal.given.batches[0]
    refusal.of(InputError, "inputs on the model's device .*, but got meta; move them with .to", x.to("meta"), y)
    refusal.then_works()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: out - out.detach(), r"a loss to be a scalar, but got shape \("),
        (lambda out, y: (out.sum(1), 4.0), r"the sum of \(sum, weight\) to be a scalar, but got shape \("),
        (lambda out, y: out.sum().item(), "a loss to be a tensor, but got float; return the loss tensor itself"),
        (lambda out, y: None, "a loss to be a tensor, but got NoneType"),
        (lambda out, y: (out.sum(), 1.0, 2.0), r"a mean, or \(sum, weight\), but got 3 values"),
        (
            lambda out, y: (out.sum(), torch.ones(3)),
            r"the weight of \(sum, weight\) to be a number, but got shape \(3,\)",
        ),
        (lambda out, y: (out.sum(), "many"), r"the weight of \(sum, weight\) to be a number, but got str"),
        (lambda out, y: (out.sum(), 0.0), "a positive weight, but got 0.0; skip batches without targets"),
        (lambda out, y: (out.sum(), float("nan")), "a positive weight, but got nan"),
        (lambda out, y: out.detach().sum(), "depends on parameters which require grad, but got one that does not"),
        (lambda out, y: out.sum() * float("nan"), "a finite loss, but got nan; look at the batch"),
        (lambda out, y: out.sum().abs() * float("inf"), "a finite loss, but got inf"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"recompute": "always"}, {"schedule": "zb-h1"}])
def test_a_loss_that_cannot_be_used(loss, message, options):
    given = plain.case("conv")
    refused = Refusal(given, **options)
    refused.pipe.loss = loss
    refused.of(InputError, message, *given.batches[0])
    refused.pipe.loss = given.loss
    refused.then_works()


def test_no_loss():
    given = plain.case("mlp")
    pipe = Pipeline(given.fresh(), example=given.example, stages=2)
    for verb in (lambda: pipe.step(*given.batches[0]), lambda: pipe.evaluate(given.batches)):
        with pytest.raises(InputError, match="a loss to train or evaluate, but got none; give loss= to the Pipeline"):
            verb()


def test_an_evaluation_of_nothing():
    given = plain.case("mlp")
    pipe = Pipeline(given.fresh(), example=given.example, stages=2, loss=given.loss)
    with pytest.raises(InputError, match="a loader with something to score"):
        pipe.evaluate([])
    assert pipe.model.training


def test_not_a_finite_gradient():
    given = plain.case("mlp")
    refused = Refusal(given, optimizer=plain.adamw, clip=1.0)
    before = plain.weights(refused.pipe.model)
    handle = refused.pipe.model[2].weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(InputError, match=r"finite gradients, but got nan in 36 of 36 numbers of the gradient of 2\.w"):
        refused.pipe.step(*given.batches[0])
    handle.remove()
    assert plain.off(plain.weights(refused.pipe.model), before) == 0


def build(**options) -> Pipeline:
    given = plain.case("mlp")
    options = {"example": given.example, "stages": 2, "loss": given.loss} | options
    return Pipeline(given.fresh(), **options)


class Foreign:
    def __init__(self) -> None:
        self.other = nn.Linear(2, 2)

    def __call__(self, params):
        return torch.optim.SGD([*params, *self.other.parameters()], lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": Foreign()}, "an optimizer over the parameters it was given, but got 2 that are not the stage's"),
        ({"optimizer": lambda params: None}, "optimizer= to make an optimizer, but got NoneType"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)},
            "optimizer= to be a function, but got SGD",
        ),
        ({"clip": 0.0}, "clip to be a positive norm, but got 0.0"),
        ({"clip": -1.0}, "clip to be a positive norm"),
        ({"accumulate": 0}, "accumulate to be at least 1 step, but got 0"),
        ({"recompute": "sometimes"}, "one of never, except-last, always, but got 'sometimes'"),
        ({"precision": "fp8"}, "precision to be bf16 or fp16, but got 'fp8'"),
        ({"offload": "disk"}, "offload to be True, False, activations, weights or all"),
        ({"microbatches": 0}, "microbatches to be a whole number of at least 1"),
        ({"stages": 0}, "stages to be a whole number of at least 1"),
        ({"stages": None}, "stages, cuts or a list of stage modules, but got none"),
        ({"stages": 40}, "at most .* stages"),
        ({"schedule": "pipedream", "optimizer": None}, "an optimizer under an asynchronous schedule, but got none"),
        ({"schedule": 3}, "schedule= to be a name, or a schedule, but got 3"),
        ({"transport": "tcp"}, "transport= to be one of shared, gloo, but got 'tcp'"),
        (
            {"lr_scheduler": lambda optimizer: None, "optimizer": plain.adamw},
            "lr_scheduler= to make an LR scheduler, but got NoneType",
        ),
        ({"schedule": "1f2b"}, "the name of a method, but got '1f2b'; try 1f1b"),
        ({"schedule": schedule("1f1b", stages=3, microbatches=4)}, "a schedule of 2 stages, but got 3"),
        (
            {"schedule": schedule("1f1b", stages=2, microbatches=8), "microbatches": 4},
            "a schedule of 4 micro-batches, but got 8",
        ),
        ({"cuts": ["4", "8"]}, "1 cuts for 2 pieces, but got 2"),
        ({"cuts": ["nowhere"]}, "cuts to name submodules"),
        ({"loss": 3}, "loss= to be a function, but got int"),
        ({"loss": nn.Bilinear(2, 2, 2)}, "a loss without parameters of its own"),
        ({"optimizer": torch.optim.LBFGS}, "an optimizer that steps once a batch, but got LBFGS"),
        ({"lr_scheduler": 3}, "lr_scheduler= to be a function, but got int"),
        ({"lr_scheduler": lambda optimizer: None}, "an optimizer for the lr_scheduler, but got none"),
        ({"cuts": "10"}, "cuts to be a list of module names"),
        ({"cuts": [3]}, "cuts to be a list of module names"),
        ({"seed": "a"}, "seed to be a whole number"),
        ({"example": None}, "example= to be a small batch"),
        ({"example": torch.full((2, 6), torch.nan, dtype=F64)}, "an example on which the model's result .* finite"),
        ({"data": "rank1"}, "data to be 'every' .* or 'rank0'"),
        ({"timeout": 0}, "timeout to be a positive number"),
        ({"example": torch.randn(2, 6, dtype=F64, device="meta")}, "inputs on the model's device"),
    ],
)
def test_a_pipeline_that_cannot_be_built(options, message):
    with pytest.raises(InputError, match=message) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


def _assigned(model):
    model.load_state_dict({name: tensor / 2 for name, tensor in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_assigned, r"16 others \(0.weight, 0.bias, 2.weight ...\)"),
        (lambda model: model.append(nn.Linear(6, 6, dtype=F64)), r"2 others \(16.weight, 16.bias\)"),
        (lambda model: model.__setitem__(4, nn.Identity()), "2 fewer"),
    ],
)
def test_parameters_that_came_or_went_since_would_not_be_trained(change, message):
    given = plain.case("mlp")
    pipe = build(optimizer=plain.adamw)
    change(pipe.model)
    for _ in range(2):
        with pytest.raises(InputError, match=f"when its Pipeline was made, but got {message}; change the model first"):
            pipe.step(*given.batches[0])


@pytest.mark.parametrize("model", [None, "abc", [nn.Linear(6, 6), 3], []])
def test_a_model_that_is_none(model):
    with pytest.raises(InputError, match=r"an nn.Module, or a list of stage modules|stage modules, each once"):
        Pipeline(model, example=torch.randn(2, 6), stages=2)


def test_the_same_module_twice_in_a_list_of_stages():
    layer = nn.Linear(6, 6)
    with pytest.raises(InputError, match="stage modules, each once"):
        Pipeline([layer, layer], example=torch.randn(2, 6))


def test_a_list_of_stages_and_another_number_of_them():
    with pytest.raises(InputError, match="stages=2 for a list of 2 stage modules, but got 3"):
        Pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], example=torch.randn(2, 6), stages=3)


@pytest.mark.parametrize("batch", [torch.randn(8, 6), (1, 2, 3), {1, 2}])
def test_a_loader_that_yields_no_pairs(batch):
    pipe = build()
    with pytest.raises(InputError, match=r"a loader of \(inputs, target\)"):
        list(pipe.train([batch]))


def test_a_loader_that_is_none():
    with pytest.raises(InputError, match="a loader that can be iterated over, but got int"):
        list(build().train(5))


def test_a_model_whose_parameters_all_are_frozen():
    given = plain.case("mlp")
    model = given.fresh().requires_grad_(False)
    with pytest.raises(InputError, match=r"requires? grad"):
        Pipeline(model, example=given.example, stages=2, loss=given.loss)


class Trouble(Exception):
    pass


class Troubled(nn.Module):
    """Raises when told to, in the forward or in the backward, from its third call on."""

    def __init__(self, error: type[BaseException], where: str) -> None:
        super().__init__()
        self.error, self.where, self.armed, self.calls = error, where, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.armed and self.calls >= 3:
            if self.where == "forward":
                raise self.error("something of the user's own")
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: torch.Tensor) -> None:
        raise self.error("something of the user's own")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [Trouble, RuntimeError, ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("options", [{}, {"recompute": "always"}, {"schedule": "zb-h1"}, {"schedule": "gpipe"}])
def test_an_exception_in_a_users_layer_keeps_its_type_and_traceback(error, where, options):
    given = plain.case("conv")
    layers = list(given.model)
    troubled = Troubled(error, where)
    given = plain.Case(nn.Sequential(*layers[:14], troubled, *layers[14:]), given.loss, given.batches, by_parts=True)
    refused = Refusal(given, **options)
    here = next(module for module in refused.pipe.model if isinstance(module, Troubled))
    here.armed, here.calls = True, 0
    text = refused.of(error, "something of the user's own", *given.batches[0])
    assert 'raise self.error("something of the user\'s own")' in text
    here.armed = False
    refused.then_works()


def test_a_failed_step_keeps_what_was_accumulated_before_it():
    given = plain.case("mlp")
    pipe = Pipeline(given.fresh(), example=given.example, stages=2, loss=given.loss, accumulate=2)
    pipe.step(*given.batches[0])
    with pytest.raises(InputError, match="finite loss"):
        pipe.step(given.batches[1][0] * float("nan"), given.batches[1][1])
    pipe.step(*given.batches[1])
    model = given.fresh()
    x, y = (torch.cat([batch[side] for batch in given.batches[:2]]) for side in (0, 1))
    plain.backward(model, given.loss, x, y)
    assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-12


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (
            lambda name: torch.zeros(()),
            r"load\('0.weight'\) to give a tensor of shape \(8, 8\), but got one of shape \(\)",
        ),
        (lambda name: torch.zeros(8, 8, device="meta"), r"of shape \(8, 8\), but got .* on the meta device"),
        (lambda name: [0.0] * 8, "but got list; load the model's own state"),
        ({"0.weight": torch.zeros(8, 8)}, "load= to be a function of a parameter's name, but got dict; .*__getitem__"),
    ],
)
def test_weights_that_cannot_fill_a_weightless_model(load, words):
    with weightless():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(InputError, match=words):
        Pipeline(model, example=torch.zeros(2, 8), stages=2, microbatches=2, load=load)


@pytest.mark.parametrize("load", [None, lambda name: torch.zeros(8)])
def test_buffers_on_the_meta_device_that_nobody_can_fill(load):
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    with torch.device("meta"):
        model = nn.Sequential(Scaled(), nn.Linear(8, 8))
    with pytest.raises(InputError, match=r"'0.scale' on the meta device; build the model under .*weightless\(\)"):
        Pipeline(model, example=torch.zeros(2, 8), stages=2, microbatches=2, load=load)


@pytest.mark.parametrize("way", ["1f1b", "pipedream"])
@pytest.mark.parametrize(
    ("optimizer", "lr_scheduler", "words"),
    [
        (torch.optim.SparseAdam, None, r"gradients that SparseAdam takes, but got dense ones \(.*; use another optim"),
        (
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda made: torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.1, total_steps=3),
            r"lasts as long as the training, but got a OneCycleLR that has come to its end \(Tried to step 4 times",
        ),
    ],
)
def test_what_torch_refuses_only_at_an_update_is_told_in_one_message(way, optimizer, lr_scheduler, words):
    given = plain.case("mlp")
    pipe = Pipeline(
        given.fresh(), example=given.example, stages=2, schedule=way, microbatches=1, loss=given.loss,
        optimizer=optimizer, lr_scheduler=lr_scheduler,
    )  # fmt: skip
    with pytest.raises(InputError, match=words) as caught:
        list(pipe.train([given.batches[0]] * 8))
    assert type(caught.value.__cause__) in (RuntimeError, ValueError)
