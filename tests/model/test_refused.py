"""What two stages cannot do together is refused by name, with the line of the user's code; nothing is lost silently."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from compare import pipeline
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import WIDTH, WORDS, Block, Of, blocks, floats, language_model, words

from penstock import SplitError

CUTS = ["blocks.1", "blocks.2", "blocks.3"]


pytestmark = pytest.mark.usefixtures("one_thread")


def row(rows=4, length=6):
    return floats(rows, length, WIDTH)


def through(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def stack(count=4, body=through, **parts):
    return Of(body, blocks=blocks(count), **parts).double()


def line_of(function, mark):
    """Where a marked line of a function stands, as a message would say it."""
    lines, first = inspect.getsourcelines(function)
    at = next(at for at, line in enumerate(lines) if mark in line)
    return f"{inspect.getsourcefile(function)}:{first + at}"


def refuses(body, mark="MARK", model=None, example=None, **options):
    options = options or {"cuts": CUTS}
    model = stack(4, body) if model is None else model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SplitError) as caught:
        pipeline(model, row() if example is None else example, **options)
    if mark:
        assert line_of(body, mark) in str(caught.value)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_on_a_module_that_a_cut_goes_through(kind):
    def my_hook(*_):
        return None

    inner = Of(through, blocks=blocks(4))
    model = Of(lambda m, x: m.inner(x), inner=inner).double()
    getattr(model.inner, kind)(my_hook)
    said = refuses(through, None, model, cuts=["inner.blocks.1"])
    assert "my_hook" in said
    assert "on inner" in said
    around = Of(lambda m, x: m.last(m.inner(m.first(x))), first=Block(), inner=inner, last=Block()).double()
    pipeline(around, row(), cuts=["last"])  # there it stays whole


def test_hooks_put_on_an_open_module_later():
    model = stack()
    pipe = pipeline(model, row(), cuts=CUTS)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(SplitError, match="the model itself"):
        pipe.step(row())
    handle.remove()
    pipe.step(row())


def test_hooks_on_all_modules_there_are():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "all modules" in refuses(through, None)
    finally:
        handle.remove()


def test_a_hook_on_a_parameter_whose_gradient_comes_in_parts():
    model = Of(
        lambda m, ids: through(m, m.words(ids)) @ m.words.weight.T, words=nn.Embedding(WORDS, WIDTH), blocks=blocks(4)
    ).double()
    model.words.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert "words.weight" in refuses(through, None, model, words(4, 5))


def test_a_tensor_hook_behind_the_cut():
    def body(m, x):
        x = m.blocks[0](x)
        y = m.blocks[2](m.blocks[1](x))
        x.register_hook(lambda g: g)  # MARK
        return m.blocks[3](y) + x

    refuses(body)


@pytest.mark.parametrize(
    "how", ["bool", "item", "tolist", pytest.param("numpy", marks=pytest.mark.cpu_only), "shape by data"]
)
def test_data_dependent_control_flow_across_a_cut(how):
    def body(m, x):
        x = m.blocks[0](x)
        if how == "bool" and x.sum() > 0:  # bool
            x = x * 2
        if how == "item":
            x = x * x.sum().item()  # item
        if how == "tolist":
            x = x * x.detach().sum().tolist()  # tolist
        if how == "numpy":
            x = x * float(x.detach().sum().numpy())  # numpy
        if how == "shape by data":
            for _ in range(int((x.detach() > 0).any())):  # shape by data
                x = x + 1
        for block in m.blocks[1:]:
            x = block(x)
        return x

    refuses(body, f"# {how}")


def test_automatic_cuts_go_around_a_decision():
    def body(m, x):
        x = m.blocks[2](m.blocks[1](m.blocks[0](x)))
        x = m.blocks[3](x)
        return m.blocks[4](x) if x.sum() > 0 else m.blocks[5](x)

    model = stack(6, body)
    pipe = pipeline(model, row(), stages=2)
    assert pipe.split.cuts[0][0] in ("blocks.1", "blocks.2", "blocks.3")
    pipe.step(row())


def test_a_module_is_not_opened_where_its_own_code_cannot_be_run_twice():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks(6)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            for block in self.blocks:
                x = block(x)
            return x

    model = Of(lambda m, x: m.last(m.odd(m.first(x))), first=Block(), odd=Odd(), last=Block()).double()
    pipe = pipeline(model, row(), stages=2)
    assert pipe.split.cuts == [("odd", 0)] or pipe.split.cuts == [("last", 0)]


def test_state_kept_on_self():
    def kept(m, x):
        x = m.blocks[0](x)
        m.side = x  # MARK
        return m.blocks[3](m.blocks[2](m.blocks[1](x))) + m.side

    def counted(m, x):
        m.calls += 1  # MARK
        return through(m, x)

    def replaced(m, x):
        x = m.blocks[0](x)
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean()  # MARK
        return m.blocks[3](m.blocks[2](m.blocks[1](x)))

    def listed(m, x):
        m.log.append(x)
        return through(m, x)

    for body, mark in ((kept, "MARK"), (counted, "MARK"), (replaced, "MARK"), (listed, None)):
        model = stack(4, body)
        model.calls, model.log = 0, []
        model.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        mean = model.mean
        assert "state" in refuses(body, mark, model)
        assert model.calls == 0
        assert model.mean is mean
        assert not hasattr(model, "side")


def test_tensors_that_pass_from_block_to_block_on_the_side():
    class Leaves(Block):
        def forward(self, x):
            x = super().forward(x)
            self.left = x * 2
            return x

    class Takes(Block):
        def __init__(self, other):
            super().__init__()
            self.other = [other]

        def forward(self, x):
            return super().forward(x) + self.other[0].left  # MARK

    leaves = Leaves()
    model = Of(through, blocks=nn.ModuleList([leaves, Block(), Takes(leaves), Block()])).double()
    said = refuses(Takes.forward, "MARK", model, cuts=["blocks.1"])
    assert "'blocks.0'" in said
    pipe = pipeline(model, row(), stages=2)  # there is a place to cut
    assert pipe.split.cuts == [("blocks.3", 0)]
    pipe.step(row(5))


def test_numbers_that_pass_on_the_side():
    class Measures(Block):
        def forward(self, x):
            self.size = float(x.detach().abs().mean())
            return super().forward(x)

    class Asks(Block):
        def forward(self, x):
            return super().forward(x) * self.other[0].size  # ASKED

    def body(m, x):
        x = m.blocks[0](x)
        y = m.blocks[2](m.blocks[1](x))
        return m.blocks[3](y) * m.blocks[0].size  # MARK

    measures = Measures()
    model = Of(body, blocks=nn.ModuleList([measures, Block(), Block(), Block()])).double()
    assert "'blocks.0'" in refuses(body, "MARK", model)
    asks = Asks()
    asks.other = [measures]
    model = Of(through, blocks=nn.ModuleList([measures, asks, Block(), Block()])).double()
    refuses(Asks.forward, "ASKED", model)
    pipeline(model, row(), cuts=["blocks.2", "blocks.3"]).step(row())  # one stage has both
    assert "__getattribute__" not in vars(nn.Module)


def test_an_opaque_object_with_a_tensor_across_a_cut():
    class Thing:
        def __init__(self, x):
            self.x = x

    class Opaque(Block):
        def forward(self, x):
            return Thing(super().forward(x))

    def body(m, x):
        thing = m.opaque(x)
        x = m.blocks[0](x)
        return m.blocks[3](m.blocks[2](m.blocks[1](x))) + thing.x  # MARK

    refuses(body, model=stack(4, body, opaque=Opaque()))


def test_a_view_changed_across_a_cut():
    def body(m, x):
        x = m.blocks[0](x) * 1
        flat = x.flatten(1)
        y = m.blocks[1](x.clone())
        x.mul_(2)  # MARK
        return m.blocks[3](m.blocks[2](y)).flatten(1) * flat

    assert "share" in refuses(body, cuts=["blocks.1"])
    pipeline(stack(4, body), row(), cuts=["blocks.3"]).forward(row(5))  # behind the change: fine


def test_a_checkpointed_region_across_a_cut():
    def body(m, x):
        x = m.blocks[0](x)
        return checkpoint(lambda x: m.blocks[3](m.blocks[2](m.blocks[1](x))), x, use_reentrant=False)  # MARK

    assert "checkpoint" in refuses(body, cuts=["blocks.2"])


def test_a_reentrant_checkpoint_hides_its_blocks():
    def body(m, x):
        x = x * m.gain
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=True)  # MARK
        return x

    model = stack(4, body)
    model.gain = nn.Parameter(torch.ones((), dtype=torch.float64))
    assert "give use_reentrant=False" in refuses(body, model=model, stages=2)


def test_a_buffer_that_two_stages_use_and_one_changes():
    def body(m, x):
        x = m.blocks[0](x) * (1 + m.count)  # MARK
        x = m.blocks[3](m.blocks[2](m.blocks[1](x)))
        m.count += 1
        return x

    model = stack(4, body)
    model.register_buffer("count", torch.zeros((), dtype=torch.float64))
    assert "'count'" in refuses(body, "MARK", model)


def test_inputs_that_share_memory_and_one_is_changed():
    def body(m, x, y):
        y.mul_(2)  # MARK
        return through(m, x) + y

    x = row()
    refuses(body, example=(x, x.view(x.shape)))


def test_a_hook_on_an_input():
    def body(m, x):
        x.register_hook(lambda g: g)  # MARK
        return through(m, x)

    refuses(body, example=row().requires_grad_())


def test_a_model_compiled_as_a_whole():
    assert "compile its blocks" in refuses(through, None, torch.compile(stack(), backend="eager"))


def test_a_result_collected_by_hooks():
    def body(m, x):
        collected = []
        handles = [
            block.register_forward_hook(lambda module, args, output: collected.append(output)) for block in m.blocks
        ]
        x = through(m, x)
        for handle in handles:
            handle.remove()
        return x, collected

    assert "on the side" in refuses(body, None)


@pytest.mark.parametrize("ask", ["output_router_logits", "output_hidden_states", "output_attentions"])
def test_what_transformers_collect_on_the_side_is_whole(ask):
    pytest.importorskip("transformers")
    make = language_model("Mixtral", num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager")
    model = make().double()
    model.set_attn_implementation("eager")
    inputs = {"input_ids": words(4, 5), ask: True}
    with torch.no_grad():
        expected = copy.deepcopy(model)(**inputs)[ask.removeprefix("output_")]
    collected = pipeline(model, inputs, stages=2).forward(inputs)[ask.removeprefix("output_")]
    assert len(collected) == len(expected)
    for one, other in zip(collected, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_cache_is_withheld_and_says_so():
    pytest.importorskip("transformers")
    pipe = pipeline(language_model("Llama")().double(), words(4, 5), stages=2)
    result = pipe.forward(words(4, 5))
    assert result.logits.shape == (4, 5, WORDS)
    with pytest.raises(SplitError, match="use_cache=False"):
        result.past_key_values.get_seq_length()
    result = pipe.forward({"input_ids": words(4, 5), "use_cache": False})
    assert result.past_key_values is None


def test_an_exception_in_a_users_layer_is_the_users_own():
    class Angry(Block):
        def forward(self, x):
            if x.shape[1] == 3:
                raise KeyError("three")
            return super().forward(x)

    model = Of(through, blocks=nn.ModuleList([Block(), Angry(), Block(), Block()])).double()
    pipe = pipeline(model, row(), stages=2)
    with pytest.raises(KeyError, match="three"):
        pipe.step(row(4, 3))
    assert all(p.grad is None for p in model.parameters())
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"
    pipe.step(row(5))
