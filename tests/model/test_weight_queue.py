"""What a user can see of a split backward besides gradients: hooks, order, memory, threads, refusals."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from halves import check, device, gradients_for, gradients_of, halves, plain
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import InputError
from penstock.model.split_backward import WeightQueue, deferring, stand_in


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 3))


class Tied(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.table, self.mid = nn.Embedding(11, 6, **settings), nn.Linear(6, 6)

    def forward(self, x):
        return F.linear(F.relu(self.mid(self.mid(self.table(x)))), self.table.weight)


class Seen:
    """Counts what hooks of parameters see."""

    def __init__(self, model):
        self.tensor, self.after = {}, {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name: self.tensor.setdefault(name, []).append(g.clone()))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.after.setdefault(name, []).append(p.grad.clone())
            )


@pytest.mark.parametrize(("build", "x"), [(mlp, lambda: torch.randn(4, 6)), (Tied, lambda: torch.arange(8))])
def test_hooks_fire_once_with_the_whole_gradient(build, x):
    model, x = build(), x()
    expected = plain(model, (x,)).weights
    seen = Seen(model)
    halves(model, (x,))
    for record in (seen.tensor, seen.after):
        assert {name: len(calls) for name, calls in record.items()} == dict.fromkeys(expected, 1)
        assert all(torch.equal(calls[0], expected[name]) for name, calls in record.items())


def test_hooks_of_a_gradient_in_both_halves_fire_for_each():
    class Both(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.weight.square().sum()

    model = Both(3, 2)
    seen = Seen(model)
    found = halves(model, (torch.randn(4, 3),))
    first, second = seen.tensor["weight"]
    assert found.early == {"weight"}
    assert torch.equal(first + second, found.weights["weight"])


def test_a_hook_may_change_the_gradient_and_an_optimizer_may_live_in_it():
    model, x = mlp(), torch.randn(4, 6)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = plain(model, (x,)).weights

    def update(parameter):
        parameter.data.sub_(parameter.grad)

    for parameter in model.parameters():
        parameter.register_hook(lambda g: 2 * g)
        parameter.register_post_accumulate_grad_hook(update)
    halves(model, (x,))
    assert all(torch.equal(p, before[n] - 2 * gradients[n]) for n, p in model.named_parameters())


def test_hooks_of_modules_see_what_they_always_see():
    model, x = mlp(), torch.randn(4, 6, requires_grad=True)
    seen = []
    for module in model:
        module.register_full_backward_hook(lambda m, gi, go: seen.append((type(m), *gi, *go)))
        module.register_forward_hook(lambda m, i, y: y * 2)
    plain(model, (x,))
    expected, seen[:] = list(seen), []
    check(model, (x,), None)
    assert len(seen) == 2 * len(expected)
    for a, b in zip(expected, seen[len(expected) :], strict=True):
        assert a[0] is b[0]
        assert all(map(torch.equal, a[1:], b[1:]))


def test_micro_batches_interleaved():
    """F0 F1 I0 F2 I1 W0 I2 W1 W2: three micro-batches in flight, gradients as if each had its plain backward."""
    model = mlp().double()
    xs = [torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (4, 2, 3)]
    for x in xs:
        model(x).square().sum().backward()
    expected, inputs = gradients_of(model), [x.grad for x in xs]
    model.zero_grad()
    for x in xs:
        x.grad = None
    queues, losses = [WeightQueue() for _ in xs], {}

    def forward(k):
        with deferring(queues[k]):
            losses[k] = model(xs[k]).square().sum()

    def input_gradient(k):
        with deferring(queues[k]):
            losses.pop(k).backward()

    def weight_gradient(k):
        queues[k].run()

    act = {"F": forward, "I": input_gradient, "W": weight_gradient}
    for word in ["F0", "F1", "I0", "F2", "I1", "W0", "I2", "W1", "W2"]:
        act[word[0]](int(word[1]))
        if word == "I1":
            assert model[0].weight.grad is None
            assert [queue.waiting for queue in queues] == [3, 3, 0]
    assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters())
    assert all(torch.equal(x.grad, g) for x, g in zip(xs, inputs, strict=True))


def test_adds_to_gradients_that_are_there():
    model, x = mlp(), torch.randn(4, 6)
    expected = plain(model, (x,)).weights
    model.zero_grad()
    there = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = there[name].clone()
    queue = WeightQueue()
    with deferring(queue):
        y = model(x)
        torch.autograd.backward([y], gradients_for([y]))
    kept = {n: p.grad for n, p in model.named_parameters()}
    queue.run()
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]  # in place, as autograd does
        assert torch.equal(parameter.grad, there[name] + expected[name])


def test_a_fresh_gradient_is_not_copied():
    """The gradient that W computes becomes `.grad` itself: with a copy, a stage's peak would hold its largest twice."""
    layer, made = nn.Linear(512, 512, bias=False), []
    queue = WeightQueue()
    with deferring(queue):
        layer(torch.randn(4, 512)).sum().backward()
    layer.weight.register_hook(lambda g: made.append(g.data_ptr()))
    queue.run()
    assert made == [layer.weight.grad.data_ptr()]


def test_two_backwards_before_the_weight_gradient():
    model, x = mlp().double(), torch.randn(4, 6, dtype=torch.float64)
    y = model(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    expected = gradients_of(model)
    model.zero_grad()
    queue = WeightQueue()
    with deferring(queue):
        y = model(x).sum()
        y.backward(retain_graph=True)
        y.backward()
    queue.run()
    torch.testing.assert_close(gradients_of(model), expected, rtol=1e-12, atol=1e-14)


def test_what_is_held():
    """Inputs and output gradients of the three linear layers, and nothing else."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 4))
    found = halves(model, (torch.randn(10, 16),))
    assert found.held == 4 * 10 * (16 + 32 + 8 + 32 + 8 + 4)


def test_a_shared_input_is_held_once():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 8) for _ in range(3))

        def forward(self, x):
            return self.q(x) * self.k(x) * self.v(x)

    assert halves(Three(), (torch.randn(10, 16),)).held == 4 * 10 * (16 + 3 * 8)


def activations():
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape in ((4, 8), (4, 3))]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_nothing_stays_alive(reentrant):
    model, kept, before = mlp(), [], len(activations())

    class Watch(nn.Module):
        def forward(self, x):
            kept.append(weakref.ref(x.untyped_storage()))
            return x.clone()

    model.insert(1, Watch())
    queue = WeightQueue()
    x = torch.randn(4, 6, requires_grad=True)
    gc.disable()
    try:
        with deferring(queue):
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            graph = weakref.ref(y.grad_fn)
            y.sum().backward()
        del y
        assert graph() is None  # the queue holds tensors, not the graph
        queue.run()
        assert [ref() for ref in kept] == [None] * (1 + (reentrant is not None))  # without the collector: no cycles
    finally:
        gc.enable()
    assert len(activations()) == before


def test_memory_falls_while_the_queue_runs():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    queue, held = WeightQueue(), []
    with deferring(queue):
        model(torch.randn(5, 8)).sum().backward()
    inputs = [weakref.ref(pairs[1][0]) for owed, _ in queue._waiting for pairs in owed.held]
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda p: held.append(sum(ref() is not None for ref in inputs)))
    queue.run()
    assert held == [3, 2, 1, 0]


def test_checkpoint_keeps_no_copy_of_a_cast_weight():
    layer, queue = nn.Linear(64, 48, bias=False), WeightQueue()
    with deferring(queue), torch.autocast(device(), dtype=torch.bfloat16):
        y = checkpoint(layer, torch.randn(2, 64, requires_grad=True), use_reentrant=False)
    assert [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == layer.weight.shape] == []
    with deferring(queue):
        y.sum().backward()
    queue.run()
    assert layer.weight.grad.dtype is torch.float32


def test_writing_to_a_held_tensor_is_noticed():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    queue = WeightQueue()
    with deferring(queue):
        layer(x).sum().backward()
    x.zero_()
    with pytest.raises(InputError, match="changed in place"):
        queue.run()


def test_a_weight_changed_before_the_input_gradient_is_noticed():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    queue = WeightQueue()
    with deferring(queue):
        y = layer(x).sum()
        with torch.no_grad():
            layer.weight.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 3), lambda: nn.Conv1d(4, 4, 3, padding=1)])
def test_a_weight_may_change_between_the_halves(build):
    layer, x = build(), torch.randn(2, 4, 3)
    expected = plain(layer, (x,)).weights
    layer.zero_grad()
    queue = WeightQueue()
    with deferring(queue):
        y = layer(x)
        torch.autograd.backward([y], gradients_for([y]))
    with torch.no_grad():
        layer.weight.zero_()
    queue.run()
    assert torch.equal(layer.weight.grad, expected["weight"])


@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 3), lambda: nn.Conv1d(4, 4, 3, padding=1)])
def test_backward_sees_the_weights_that_the_parameter_points_to(build):
    """Whoever keeps weight versions points `.data` to one of them; both kinds of layer follow."""
    layer, x = build(), torch.randn(2, 4, 3, requires_grad=True)
    mine = layer.weight.data
    queue = WeightQueue()
    with deferring(queue):
        y = layer(x)
    layer.weight.data = torch.zeros_like(mine)
    with deferring(queue):
        y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def own_functions():
    return {name: getattr(place, name) for place, names in PLACES for name in names}


PLACES = [
    (F, ["linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d"]),
    (torch, ["conv1d", "conv2d", "addmm", "embedding"]),
]


def test_outside_nothing_is_replaced():
    before = own_functions()
    queue = WeightQueue()
    with deferring(queue), deferring(WeightQueue()):
        assert not any(now is before[name] for name, now in own_functions().items())
    with pytest.raises(ZeroDivisionError), deferring(queue):
        raise ZeroDivisionError
    assert all(now is before[name] for name, now in own_functions().items())


def test_what_somebody_else_replaced_stays_theirs(monkeypatch):
    own = F.linear
    theirs = lambda x, w, b=None: own(x, w, b)  # noqa: E731
    monkeypatch.setattr(F, "linear", theirs)
    with deferring(WeightQueue()):
        assert F.linear is theirs
    assert F.linear is theirs


def test_the_innermost_queue_gets_the_work():
    layer, outer, inner = nn.Linear(3, 2), WeightQueue(), WeightQueue()
    with deferring(outer):
        with deferring(inner):
            y = layer(torch.randn(4, 3))
        y.sum().backward()
    assert (outer.waiting, inner.waiting) == (0, 1)


def test_the_forward_queue_is_found_by_a_backward_elsewhere():
    layer, queue = nn.Linear(3, 2), WeightQueue()
    with deferring(queue):
        y = layer(torch.randn(4, 3)).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert queue.waiting == 1


def test_other_threads_are_left_alone():
    queue, theirs, x = WeightQueue(), nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)

    def train():
        checkpoint(theirs, x, use_reentrant=False).sum().backward()

    with deferring(queue):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert queue.waiting == 0
    assert theirs.weight.grad is not None


class Again(nn.Sequential):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_threads_with_queues_of_their_own(reentrant):
    start = threading.Barrier(2)
    models = [mlp().double() if reentrant is None else Again(*mlp().double()) for _ in range(2)]
    Again.reentrant = reentrant
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    expected = [plain(model, (x,)).weights for model in models]
    found = [None, None]

    def work(k):
        start.wait()
        for _ in range(20):
            found[k] = halves(models[k], (x,))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for have, want in zip(found, expected, strict=True):
        assert have.early == {"1.weight", "1.bias"}
        assert all(torch.equal(have.weights[n], want[n]) for n in want)


def test_recompute_outside_is_noticed():
    """Without stand-ins, recompute would hand a transposed weight to a backward that expects it straight."""
    layer, queue = nn.Linear(3, 3), WeightQueue()
    with deferring(queue):
        y = checkpoint(layer, torch.randn(3, 3, requires_grad=True), use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


class Twice(torch.autograd.Function):
    """A user's own layer: the functions inside see no graph, and its backward gives the weight its gradient."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w) * 2

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * F.linear(g, w.t()), 2 * F.linear(g.t(), x.t())


def test_inside_a_custom_function():
    class Model(nn.Linear):
        def forward(self, x):
            return Twice.apply(x, self.weight) + self.bias

    check(nn.Sequential(nn.Linear(3, 3), Model(3, 2)), (torch.randn(4, 3, requires_grad=True),), {"1.weight", "1.bias"})


def test_a_custom_checkpoint():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer, dummy):
            ctx.layer = layer
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx, g):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.layer(x)
            torch.autograd.backward(y, g)
            return x.grad, None, None

    class Model(nn.Linear):
        def forward(self, x):
            return Again.apply(x, super().forward, self.weight.detach().requires_grad_())

    check(Model(3, 3), (torch.randn(4, 3, requires_grad=True),), set())


def test_gradients_of_activations_queue_nothing():
    model, x, queue = mlp(), torch.randn(4, 6, requires_grad=True), WeightQueue()
    with deferring(queue):
        torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward(inputs=[x])
    assert queue.waiting == 0
    assert x.grad is not None


@pytest.mark.parametrize("unused", [False, True])
def test_gradients_of_parameters_inside_are_refused(unused):
    layer = nn.Linear(3, 2)
    with deferring(WeightQueue()):
        y = layer(torch.randn(4, 3)).sum()
        with pytest.raises(InputError, match="with respect to a parameter"):
            torch.autograd.grad(y, layer.weight, allow_unused=unused)


def test_a_differentiated_backward_is_refused():
    with deferring(WeightQueue()):
        y = nn.Linear(3, 2)(torch.randn(4, 3, requires_grad=True)).square().sum()
        with pytest.raises(InputError, match="create_graph"):
            y.backward(create_graph=True)


def test_no_gradient_no_graph():
    layer, queue = nn.Linear(3, 2), WeightQueue()
    with deferring(queue), torch.no_grad():
        assert not layer(torch.randn(4, 3)).requires_grad
    with deferring(queue), torch.inference_mode():
        assert layer(torch.randn(4, 3)).is_inference()
    queue.run()
    assert layer.weight.grad is None


def test_torch_errors_are_torch_errors():
    with deferring(WeightQueue()):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.Linear(3, 2)(torch.randn(4, 4))
        with pytest.raises(RuntimeError, match="expected input"):
            nn.Conv1d(3, 2, 1)(torch.randn(1, 4, 4))
        with pytest.raises(RuntimeError, match="dtype"):
            nn.Linear(3, 2)(torch.randn(4, 3, dtype=torch.float64))
        with pytest.raises(TypeError):
            F.linear(torch.randn(4, 3), [1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_functions_that_something_else_watches():
    layer, queue = nn.Linear(3, 2), WeightQueue()
    parameters = dict(layer.named_parameters())
    called = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 3)
    with deferring(queue):
        torch.func.grad(lambda p: torch.func.functional_call(layer, p, x).sum())(parameters)
        torch.func.vmap(layer)(x)
        with torch.autograd.forward_ad.dual_level():
            layer(torch.autograd.forward_ad.make_dual(x, x))
        with Mode():
            layer(x).sum().backward()
        assert queue.waiting == 0
        with torch.device(device()):
            layer(x).sum().backward()
        assert queue.waiting == 1
    assert torch._C._nn.linear in called


def test_a_function_mode_may_put_off_as_well():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return stand_in(func)(*args, **(kwargs or {}))

    model, queue = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2), nn.Conv1d(1, 2, 1)), WeightQueue()
    with deferring(queue), Mode():
        y = model(torch.arange(3).unsqueeze(1))
    y.sum().backward()
    assert queue.waiting == 3


def test_a_compiled_module_is_whole():
    model, x = mlp(), torch.randn(4, 6, requires_grad=True)
    found = halves(torch.compile(model, backend="aot_eager"), (x,))
    assert found.held == 0
    expected = plain(model, (x,)).weights
    torch.testing.assert_close({n.removeprefix("_orig_mod."): g for n, g in found.weights.items()}, expected)


def test_saved_tensors_may_be_offloaded():
    with torch.autograd.graph.save_on_cpu():
        check(mlp(), (torch.randn(4, 6, requires_grad=True),), {"1.weight", "1.bias"})
