"""What a tracer would lose is kept: hooks, custom backwards, checkpoints, regions, Python inside blocks, views."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from compare import PARTS, assert_same, assert_same_result, call, check, pipeline, plain, stepped
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import WIDTH, WORDS, Block, Of, blocks, floats, score, words

from penstock.model.passage import Passage


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    random.seed(5)
    yield
    torch.set_num_threads(before)


def row(rows=4, length=6):
    return floats(rows, length, WIDTH)


BATCHES = [row(3, 5), row(5, 9), row(7, 9)]


def through(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def stack(count=6, body=through, **parts):
    return Of(body, blocks=blocks(count), **parts).double()


def staged(split, *args, **kwargs):
    """The model's result by its stages, one after the other, with their history."""
    path, passage, values, result = split.path(args, kwargs), Passage(), {}, None
    for stage in range(split.pieces):
        received = {v: values[v].clone() if v in path.changed[stage] else values[v] for v in path.incoming[stage]}
        made, result = split.run(path, stage, received, passage, args, kwargs)
        values.update(made)
    return result


# hooks


def test_forward_hooks_on_blocks_fire_once_a_micro_batch_and_may_change_results():
    model, seen = stack(), []

    def note(module, args, output):
        seen.append(output.detach().clone())
        return output * 1.5

    model.blocks[2].register_forward_hook(note)
    pipe = pipeline(model, row(), cuts=["blocks.2", "blocks.3", "blocks.4"])
    inputs = row(5, 7)
    wanted = plain(model, inputs, parts=PARTS)
    theirs = seen[-PARTS:]
    pipe.step(inputs)  # the first step also compares its loss with the whole batch's
    seen.clear()
    assert_same(stepped(pipe, inputs), wanted)
    assert len(seen) == PARTS
    assert all(map(torch.equal, seen, theirs))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_full_backward_hooks_on_blocks_see_and_change_gradients(at):
    model, seen = stack(), []

    def halve(module, inputs, outputs):
        seen.append(outputs[0].clone())
        return tuple(None if gradient is None else gradient * 0.5 for gradient in inputs)

    model.blocks[at].register_full_backward_hook(halve)
    pipe = pipeline(model, row(), cuts=["blocks.2", "blocks.3", "blocks.5"])
    inputs = row(5, 7)
    wanted = plain(model, inputs, parts=PARTS)
    theirs = seen[-PARTS:]
    pipe.step(inputs)
    seen.clear()
    assert_same(stepped(pipe, inputs), wanted)
    assert len(seen) == PARTS
    for mine, whole in zip(seen, theirs, strict=True):
        torch.testing.assert_close(mine, whole)


def test_parameter_hooks_fire():
    model = stack()
    wanted = plain(model, BATCHES[1])
    wanted[1]["blocks.4.up.weight"] *= 3
    model.blocks[4].up.weight.register_hook(lambda gradient: gradient * 3)
    assert_same(stepped(pipeline(model, row(), stages=4), BATCHES[1]), wanted)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_tensor_hooks_in_forward_run_once_on_the_stage_that_makes_the_tensor(recompute):
    seen = []

    def body(m, x):
        for at, block in enumerate(m.blocks):
            x = block(x)
            if at == 1:
                keep = x
                if x.requires_grad:
                    x.register_hook(lambda g: seen.append(1) or g * 0.5)
        return x + keep

    model = stack(body=body)
    pipe = pipeline(model, row(), cuts=["blocks.2", "blocks.3", "blocks.4"], recompute=recompute)
    wanted = plain(model, BATCHES[1], parts=PARTS)
    pipe.step(BATCHES[1])
    seen.clear()
    assert_same(stepped(pipe, BATCHES[1]), wanted)
    assert len(seen) == PARTS


# custom backwards


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return 2 * gradient * w, 3 * (gradient * x).sum((0, 1))


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return Doubled.apply(x, self.weight)


@pytest.mark.parametrize("where", ["glue", "block"])
def test_custom_autograd_functions(where):
    def body(m, x):
        for block in m.blocks:
            x = block(x)
            x = m.custom(x) if where == "block" else Doubled.apply(x, m.custom.weight)
        return x

    check(stack(4, body, custom=Custom()), row(), BATCHES, cuts=["blocks.1", "blocks.2", "blocks.3"])


# checkpoints and regions


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's own, of its older checkpoint
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around blocks", "inside a block"])
def test_checkpointed_blocks(where, reentrant):
    runs = []

    class Counting(Block):
        def forward(self, x):
            runs.append(1)
            return super().forward(x)

    class Inner(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    def body(m, x):
        x = m.first(x)
        for block in m.blocks:
            x = block(x) if where == "inside a block" else checkpoint(block, x, use_reentrant=reentrant)
        return x

    model = Of(body, first=Block(), blocks=nn.ModuleList(Counting() for _ in range(4)))
    if where == "inside a block":
        model.blocks = nn.ModuleList(map(Inner, model.blocks))
    cuts = ["blocks.1", "blocks.2", "blocks.3"] if where == "inside a block" or not reentrant else ["blocks.0"]
    if where == "around blocks" and reentrant:
        model.last = Block()
        model.body = lambda m, x: m.last(body(m, x))
        cuts = ["last"]
    pipe = check(model.double(), row(), BATCHES, cuts=cuts)
    runs.clear()
    pipe.step(BATCHES[0])
    assert len(runs) == 2 * 4 * PARTS


def test_a_checkpointed_region_is_not_cut_by_itself():
    def both(m, x):
        return m.blocks[2](m.blocks[1](x))

    def body(m, x):
        x = checkpoint(both, m, m.blocks[0](x), use_reentrant=False)
        return m.blocks[4](m.blocks[3](x))

    pipe = check(stack(5, body), row(), BATCHES, stages=2)
    assert pipe.split.cuts != [("blocks.2", 0)]


@pytest.mark.parametrize("region", ["autocast", "no_grad", "save_on_cpu", "caught"])
def test_regions_of_the_users_may_span_cuts(region):
    def body(m, x):
        x = m.blocks[0](x)
        around = {
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            "no_grad": torch.no_grad,
            "save_on_cpu": torch.autograd.graph.save_on_cpu,
            "caught": nullcontext,
        }[region]
        with around():
            for block in m.blocks[1:5]:
                try:
                    y = block(x)
                finally:
                    x = x
                x = y
        return m.blocks[5](x.to(m.blocks[5].up.weight.dtype))

    dtype = torch.float32 if region == "autocast" else torch.float64
    model = stack(6, body).to(dtype)
    inputs = [batch.to(dtype) for batch in BATCHES]
    pipe = pipeline(model, row().to(dtype), cuts=["blocks.2", "blocks.3", "blocks.4"])
    for batch in inputs:  # bits: bfloat16 forgives nothing less
        ours, theirs = stepped(pipe, batch), plain(model, batch, parts=PARTS)
        assert ours[1].keys() == theirs[1].keys()
        assert_same(ours, theirs, 1e-6 if region == "autocast" else 1e-12)


# Python inside blocks


class Dropped(nn.Module):
    """Layer drop by Python's random, inside one block."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.taken, self.told = Block(), Block(), [], []

    def forward(self, x):
        x = self.one(x)
        self.taken.append(self.told.pop(0) if self.told else random.random() < 0.5)
        return self.two(x) if self.taken[-1] else x


def test_layer_drop_inside_a_block():
    model = Of(through, blocks=nn.ModuleList(Dropped() for _ in range(4))).double()
    pipe = pipeline(model, row(), stages=4)
    for block in model.blocks:
        block.taken.clear()
    found = stepped(pipe, BATCHES[1])
    gradients = {name: gradient.clone() for name, gradient in found[1].items()}
    for block in model.blocks:
        block.told = block.taken[:PARTS]
    assert len({tuple(block.told) for block in model.blocks}) > 1
    assert_same((found[0], gradients), plain(model, BATCHES[1], parts=PARTS))


def test_tracing_and_verifying_leave_random_states_alone():
    model, example = Of(through, blocks=nn.ModuleList(Dropped() for _ in range(4))).double(), row()
    states = random.getstate(), torch.get_rng_state()
    pipeline(model, example, stages=2)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.two(x)


def test_data_dependent_control_flow_inside_a_block():
    model = Of(through, blocks=nn.ModuleList(Decides() for _ in range(4))).double()
    check(model, row(), BATCHES, by_parts=True, cuts=["blocks.1", "blocks.2", "blocks.3"])
    check(model, row(), BATCHES, by_parts=True, stages=2)


def test_decisions_on_inputs_take_another_path():
    def body(m, ids):
        x = m.words(ids)
        deep = bool((ids == 3).any())
        for block in m.blocks[:3]:
            x = block(x)
        return m.blocks[3](x) if deep else x

    model = Of(body, words=nn.Embedding(WORDS, WIDTH), blocks=blocks(4)).double()
    some = torch.full((6, 5), 4)
    other = some.clone()
    other[:, 1] = 3
    mixed = torch.cat([some[:3], other[:3]])
    check(model, some[:4], [some, other, mixed, some], by_parts=True, cuts=["blocks.0", "blocks.1", "blocks.2"])


def test_modules_that_return_more_than_tensors():
    class Talks(Block):
        def forward(self, x):
            return {"x": super().forward(x), "size": x.shape[1], "name": "block", "flag": None}

    class Thing:
        def __init__(self, count):
            self.count = count

    class Opaque(Block):
        def forward(self, x):
            return super().forward(x), Thing(x.shape[1])

    def body(m, x):
        first = m.talks(x)
        x, thing = m.opaque(first["x"])
        x = x * first["size"] / thing.count
        for block in m.blocks:
            x = block(x)
        assert first["name"] == "block"
        assert first["flag"] is None
        return x * first["size"] + thing.count

    check(stack(4, body, talks=Talks(), opaque=Opaque()), row(), BATCHES, cuts=["opaque", "blocks.0", "blocks.2"])


def test_an_opaque_object_with_a_tensor_inside_one_stage():
    class Thing:
        def __init__(self, x):
            self.x = x

    class Opaque(Block):
        def forward(self, x):
            return Thing(super().forward(x))

    def body(m, x):
        return through(m, m.opaque(x).x * 2)

    model = stack(4, body, opaque=Opaque())
    check(model, row(), BATCHES, cuts=["blocks.0", "blocks.1", "blocks.3"])
    check(model, row(), BATCHES, stages=3)


@dataclass
class Batch:
    x: torch.Tensor
    scale: torch.Tensor
    times: int = 2


def test_a_dataclass_among_the_inputs():
    def body(m, batch):
        return through(m, batch.x * batch.times) * batch.scale

    batches = [(Batch(x, x[..., :1]),) for x in BATCHES]
    check(stack(4, body), batches[0], batches, stages=4)


def test_an_enum_an_object_and_keywords_in_another_order():
    def body(m, x, y, how=None, how_much=1.0):
        x = through(m, x * how.factor if how else x)
        return x - y * how_much

    class How:
        factor = 2

    model = stack(4, body)
    pipe = pipeline(model, {"x": row(), "y": row(), "how": How(), "how_much": 2.0}, stages=4)
    for batch in BATCHES:
        for inputs in ({"y": batch + 1, "x": batch}, {"x": batch, "y": batch, "how": How(), "how_much": 0.5}):
            assert_same(stepped(pipe, inputs), plain(model, inputs))


# inputs that change their kind


def test_none_that_becomes_a_tensor_and_an_int_and_a_string_that_change():
    def body(m, x, mask=None, times=1, how="add"):
        for _ in range(times):
            x = m.blocks[0](x)
        for block in m.blocks[1:]:
            x = block(x) if mask is None else block(x) * mask
        return x + 1 if how == "add" else x * 2

    model = stack(4, body)
    pipe = pipeline(model, {"x": row()}, cuts=["blocks.1", "blocks.2", "blocks.3"])
    for batch in BATCHES:
        for more in ({}, {"mask": batch[..., :1]}, {"times": 3}, {"times": 2}, {"how": "twice", "mask": batch}, {}):
            inputs = {"x": batch, **more}
            assert_same(stepped(pipe, inputs), plain(model, inputs))


def test_an_int_that_changes_each_step_is_not_traced_each_step():
    def body(m, x, step):
        return through(m, x) * step

    model = stack(4, body)
    pipe = pipeline(model, (row(), 1), stages=2)
    for step in range(2, 8):
        assert_same(stepped(pipe, (BATCHES[0], step)), plain(model, (BATCHES[0], step)))
    assert sum(map(len, pipe.split.paths.values())) <= 2  # with gradients, and without for the first step's comparison


def test_a_float_and_an_object_that_change_each_step_are_not_traced_each_step():
    class How:
        def __init__(self, deep):
            self.deep = deep

    def body(m, x, how, factor):
        x = m.blocks[0](x)
        x = x.view(x.shape[0], -1, WIDTH) * factor
        x = m.blocks[2](m.blocks[1](x))
        return m.blocks[3](x) if how.deep else x

    model = stack(4, body)
    pipe = pipeline(model, (row(), How(True), 1.0), cuts=["blocks.1", "blocks.2"])
    for step in range(6):
        inputs = (BATCHES[0], How(step % 2 == 0), step / 7)
        assert_same(stepped(pipe, inputs), plain(model, inputs))
    assert sum(map(len, pipe.split.paths.values())) <= 4  # deep or not, with gradients or without


def test_batch_one_takes_another_path_by_the_shape_of_what_a_layer_made():
    """As transformers' masks do: rows of the embedding against rows of the positions."""

    def body(m, ids):
        x = m.words(ids)
        places = torch.arange(ids.shape[1])[None]
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        for block in m.blocks:
            x = block(x) + places[..., None]
        return x

    model = Of(body, words=nn.Embedding(WORDS, WIDTH), blocks=blocks(4)).double()
    check(model, words(4, 5), [words(rows, length) for rows in (3, 5, 8) for length in (1, 4)], stages=4)


def test_a_forward_that_asks_for_gradients_itself():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            with torch.enable_grad():
                place = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.block(place).sum(), place, create_graph=True)
            return x + slope

    model = Of(through, blocks=nn.ModuleList(Force() for _ in range(4))).double()
    check(model, row(), BATCHES, stages=4)


def test_batch_five_after_example_eight_and_example_one():
    model = stack(4)
    for rows in (8, 1):
        check(model, row(rows), [row(5, 6), row(12, 2), row(3, 1)], stages=4)


def test_lengths_that_change_the_number_of_events():
    def body(m, x):
        state = torch.zeros_like(x[:, 0])
        for at in range(x.shape[1]):
            state = m.cell(x[:, at], state)
        return m.blocks[1](m.blocks[0](state))

    model = stack(2, body, cell=nn.GRUCell(WIDTH, WIDTH))
    check(model, row(), BATCHES, cuts=["blocks.0", "blocks.1"])


# in place


def test_in_place_relu_at_a_cut():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(True)) for _ in range(4))).double()
    check(model, row(), BATCHES, cuts=["0.1", "1.1", "2.1"])


def test_in_place_relu_on_the_input_leaves_the_users_batch_alone():
    model = nn.Sequential(nn.ReLU(True), *(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    example = row()
    before = example.clone()
    pipe = pipeline(model, example, stages=4)
    assert torch.equal(example, before)
    for batch in BATCHES:
        assert_same(stepped(pipe, batch.clone()), plain(model, batch.clone()))


def test_an_input_changed_in_place_after_something_was_computed_from_it():
    def body(m, x, noise):
        mean = noise.mean(-1, keepdim=True)  # every stage computes this itself, from the input as it came
        noise.mul_(2)
        for block in m.blocks:
            x = block(x) + mean
        return x + noise

    model = stack(4, body)
    pipe = pipeline(model, (row(), row()), stages=4)
    for batch in BATCHES:
        assert_same(stepped(pipe, (batch, batch.clone() + 1)), plain(model, (batch, batch.clone() + 1)))


@pytest.mark.parametrize("add", ["iadd", "add_", "setitem"])
def test_glue_that_adds_in_place_across_cuts(add):
    def body(m, x):
        total = torch.zeros_like(x)
        for block in m.blocks:
            x = block(x)
            if add == "iadd":
                total += x
            elif add == "add_":
                total.add_(x)
            else:
                total[:, 0] = total[:, 0] + x[:, 0]
        return total * x

    check(stack(6, body), row(), BATCHES, cuts=["blocks.1", "blocks.2", "blocks.5"])


def test_a_view_of_a_received_tensor_changed_in_place():
    def body(m, x):
        x = m.blocks[1](m.blocks[0](x))
        x = m.blocks[2](x) + 0
        y = m.blocks[3](x.clone())
        head = x[:, :1]
        head.mul_(3)  # x itself is changed, on the stage behind the cut
        return m.blocks[5](m.blocks[4](y) + x) + x

    check(stack(6, body), row(), BATCHES, cuts=["blocks.1", "blocks.3", "blocks.5"])


def test_a_base_changed_before_the_cut_shows_in_its_view():
    def body(m, x):
        x = m.blocks[0](x) * 1
        flat = x.flatten(1)
        x.add_(1)
        for block in m.blocks[1:]:
            x = block(x)
        return x.flatten(1) * flat

    check(stack(4, body), row(), BATCHES, cuts=["blocks.1", "blocks.2", "blocks.3"])


def test_a_value_that_two_later_stages_read_and_one_changes():
    def body(m, x):
        first = m.blocks[0](x)
        copy_ = first * 1
        x = m.blocks[1](first)
        x = m.blocks[2](x + copy_)
        copy_ += x
        x = m.blocks[3](x)
        return x * copy_ + first

    check(stack(4, body), row(), BATCHES, cuts=["blocks.1", "blocks.2", "blocks.3"])


# buffers


def counting(cut_between):
    def body(m, x):
        x = m.blocks[0](x)
        m.count += 1
        x = x * (1 + 0 * m.count)
        for block in m.blocks[1:]:
            x = block(x)
        return x

    model = stack(4, body)
    model.register_buffer("count", torch.zeros((), dtype=torch.float64))
    return model


def test_a_buffer_that_glue_changes_counts_every_micro_batch_once():
    model = counting(False)
    pipe = pipeline(model, row(), cuts=["blocks.1", "blocks.2", "blocks.3"])
    assert model.count == 0  # neither the trace nor the comparison shows
    for step in range(1, 4):
        assert_same(stepped(pipe, BATCHES[1]), plain(model, BATCHES[1], parts=PARTS))
        assert model.count == step * PARTS


def test_buffers_that_blocks_change_inside():
    class Counts(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return super().forward(x) * self.seen.clone()

    model = Of(through, blocks=nn.ModuleList(Counts() for _ in range(4))).double()
    pipe = pipeline(model, row(), stages=4)
    assert all(block.seen == 0 for block in model.blocks)
    wanted = plain(model, BATCHES[1], parts=PARTS)
    assert_same(stepped(pipe, BATCHES[1]), wanted)
    assert all(block.seen == PARTS for block in model.blocks)


def test_state_that_blocks_keep_inside_is_not_spoilt_by_tracing():
    class Remembers(Block):
        calls, last = 0, None

        def forward(self, x):
            self.calls, self.last = self.calls + 1, x
            return super().forward(x)

    model = Of(through, blocks=nn.ModuleList(Remembers() for _ in range(4))).double()
    pipe = pipeline(model, row(), stages=2)
    assert all(block.calls == 0 and block.last is None for block in model.blocks)
    pipe.forward(BATCHES[1])
    assert [block.calls for block in model.blocks] == [PARTS] * 4


# kinds of modules


def test_shared_modules_under_two_names_and_cuts_by_either():
    model = stack(4)
    model.alias = model.blocks[2]
    check(model, row(), BATCHES, cuts=["blocks.1", "alias", "blocks.3"])


def test_a_module_called_by_its_forward_and_one_made_on_the_fly():
    def body(m, x):
        x = m.blocks[0].forward(x)
        x = nn.Tanh()(x)
        return m.blocks[3](m.blocks[2](m.blocks[1](x)))

    check(stack(4, body), row(), BATCHES, cuts=["blocks.1", "blocks.2", "blocks.3"])


def test_parametrized_and_weight_normed_layers():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    nn.utils.parametrizations.weight_norm(model[1])
    nn.utils.parametrizations.orthogonal(model[2])
    check(model, row(), BATCHES, stages=4)


def test_an_atom_that_returns_its_own_weight():
    class Gives(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    def body(m, x):
        x, weight = m.gives(x)
        return through(m, x) @ weight

    check(stack(4, body, gives=Gives(WIDTH, WIDTH)), row(), BATCHES, cuts=["blocks.0", "blocks.1", "blocks.3"])


@pytest.mark.cpu_only
def test_packed_sequences():
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    def body(m, x, lengths):
        packed = pack_padded_sequence(m.blocks[0](x), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = m.one(packed)
        packed, _ = m.two(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return m.blocks[1](x)

    model = stack(2, body, **{name: nn.LSTM(WIDTH, WIDTH, batch_first=True) for name in ("one", "two")})
    batches = [(x, torch.arange(len(x)) % 4 + 1) for x in BATCHES]
    check(model, batches[0], batches, cuts=["one", "two", "blocks.1"])


@pytest.mark.cpu_only
def test_constants_made_outside_torch():
    import numpy as np

    table = torch.linspace(0, 1, WIDTH, dtype=torch.float64)

    def body(m, x):
        ramp = torch.from_numpy(np.arange(x.shape[1], dtype=np.float64))
        x = m.blocks[0](x) * table
        return m.blocks[3](m.blocks[2](m.blocks[1](x * ramp[:, None]))) * table + ramp[:, None]

    check(stack(4, body), row(), BATCHES, cuts=["blocks.1", "blocks.2", "blocks.3"])


def test_a_hidden_cache_passed_to_every_block():
    """As transformers do with keys and values: each block fills its own place in one shared object."""

    class Cache:
        def __init__(self):
            self.layers = {}

    class Cached(Block):
        def forward(self, x, cache=None, at=0):
            x = super().forward(x)
            cache.layers[at] = x
            return x + cache.layers[at].tanh()

    def body(m, x):
        cache = Cache()
        for at, block in enumerate(m.blocks):
            x = block(x, cache=cache, at=at)
        return x

    check(Of(body, blocks=nn.ModuleList(Cached() for _ in range(4))).double(), row(), BATCHES, stages=4)


def test_a_forward_that_takes_its_inputs_out_of_a_dict_or_adds_to_a_list():
    """Every stage runs that code: each must find the containers as the user has handed them in."""

    def popping(m, batch):
        x, twice = batch.pop("x"), batch.setdefault("twice", 2)
        for block in m.blocks:
            x = block(x) * twice
        return x

    def growing(m, xs):
        for block in m.blocks:
            xs.append(block(xs[-1]))
        return sum(xs[1:])

    for body, pack in ((popping, lambda x: ({"x": x},)), (growing, lambda x: ([x],))):
        model, example = stack(4, body), pack(row())
        pipe = pipeline(model, example, stages=4)
        for x in BATCHES:
            given = pack(x)
            assert_same(stepped(pipe, given), plain(model, pack(x)))
            assert_same_result(pipe.forward(given), call(model, pack(x)))
            assert len(given[0]) == len(example[0]) == 1


def test_a_list_of_stage_modules_passes_tuples_and_dicts_on():
    class Two(Block):
        def forward(self, x):
            return super().forward(x), x

    class Named(Block):
        def forward(self, x, y):
            return {"a": super().forward(x), "b": y}

    class Last(Block):
        def forward(self, a, b):
            return super().forward(a) * b

    modules = [Two().double(), Named().double(), nn.Tanh(), Last().double()]
    modules[2] = Of(lambda m, a, b: {"a": a.tanh(), "b": b})  # a stage without parameters

    def whole(x):
        return modules[3](**modules[2](**modules[1](*modules[0](x))))

    pipe = pipeline(modules, row())
    for batch in BATCHES:
        for module in modules:
            module.zero_grad()
        loss = score(whole(batch))
        loss.backward()
        wanted = {name: p.grad.clone() for name, p in pipe.model.named_parameters()}
        assert_same(stepped(pipe, batch), (loss.item(), wanted))
        with torch.no_grad():
            assert_same_result(pipe.forward(batch), whole(batch))


def test_stages_without_parameters():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)).double()
    pipe = check(model, row(), BATCHES, cuts=["1", "2", "3"])
    assert [len(pipe.split.parameters(stage)) for stage in range(4)] == [2, 0, 0, 2]


def test_one_stage_is_the_model_itself():
    def body(m, x):
        m.state = x  # may do what it likes
        return m.blocks[0](x) if random.random() < 2 else None

    model = stack(1, body)
    model.register_forward_hook(lambda module, args, output: output * 2)
    pipe = pipeline(model, row(), stages=1)
    assert_same(stepped(pipe, BATCHES[0]), plain(model, BATCHES[0]))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_is_whole():
    model = stack(4)
    for at in range(4):
        model.blocks[at] = torch.compile(model.blocks[at], backend="eager")
    check(model, row(), BATCHES[:2], cuts=["blocks.1", "blocks.2", "blocks.3"])


# modes, and steps in any order


def test_two_steps_without_zeroing_add_up_and_eval_between_changes_nothing():
    model = stack(4)
    pipe = pipeline(model, row(), stages=4)
    wanted = plain(model, BATCHES[1])[1]
    other = plain(model, BATCHES[2])[1]
    stepped(pipe, BATCHES[1])
    pipe.forward(BATCHES[0])
    model.eval()
    pipe.forward(BATCHES[2])
    model.train()
    pipe.step(BATCHES[2])
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same((0.0, found), (0.0, {name: wanted[name] + other[name] for name in wanted}))


def test_inference_with_a_smaller_then_a_larger_batch():
    model = stack(4)
    pipe = pipeline(model, row(), stages=4, microbatches=4)
    with torch.no_grad():
        for rows in (8, 3, 1, 13, 6):
            batch = row(rows, 4)
            assert_same_result(pipe.forward(batch), call(model, batch))


def test_batch_six_over_four():
    model = stack(4)
    pipe = pipeline(model, row(), stages=4, microbatches=4)
    batch = row(6)
    assert_same(stepped(pipe, batch), plain(model, batch))


def test_modules_kept_in_eval_mode_take_their_own_path():
    def body(m, x):
        for block in m.blocks:
            x = block(x)
            x = x * 2 if m.inner.training else x
        return x

    model = stack(4, body, inner=nn.Identity())
    pipe = pipeline(model, row(), stages=2)
    for training in (True, False, True):
        model.inner.train(training)
        assert_same(stepped(pipe, BATCHES[1]), plain(model, BATCHES[1]))


def test_a_step_inside_no_grad_still_trains():
    model = stack(4)
    pipe = pipeline(model, row(), stages=4)
    with torch.no_grad():
        found = stepped(pipe, BATCHES[1])
    assert_same(found, plain(model, BATCHES[1]))


def test_inputs_that_want_a_gradient():
    model = stack(4, lambda m, x, y: through(m, x) * y)
    ours = [t.clone().requires_grad_() for t in (BATCHES[1], BATCHES[1] + 1)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    pipe = pipeline(model, (row(), row()), stages=4)
    pipe.step(tuple(ours))
    score(copy.deepcopy(model)(*theirs)).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def test_frozen_parameters_get_no_gradient_and_tied_ends_one():
    model = Of(
        lambda m, ids: F.linear(through(m, m.words(ids)), m.words.weight),
        words=nn.Embedding(WORDS, WIDTH),
        blocks=blocks(4),
    ).double()
    model.blocks[1].requires_grad_(False)
    pipe = check(model, words(4, 5), [words(3, 6), words(7, 4)], stages=4)
    assert pipe.split.owner["words.weight"] == 0


class Reversed(torch.autograd.Function):
    """Keeps its input alone, and runs its layers again in its backward, which is one of its own."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        ctx.save_for_backward(x.detach())
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y = x.detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
            y.backward(gradient)
        return x.grad, None


def test_a_backward_that_calls_another_backward():
    """As reversible layers do: gradients of theirs are nowhere but in `.grad`."""
    model = Of(lambda m, x: m.last(m.mid(m.first(x))), first=Block(), mid=Of(_reversed, layers=blocks(3)), last=Block())
    check(model.double(), row(), BATCHES, stages=3)


def _reversed(m, x):
    return Reversed.apply(x, m.layers)
