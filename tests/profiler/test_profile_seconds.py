"""Seconds of a profile: they add up, come from the models that pipelines run, and say when others were in the way."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from model.zoo import ZOO, born, score
from penstock.app.profile.api import measure_profile
from penstock.app.profile.table import notes
from penstock.core.action import Op
from penstock.profiler.bench import _later, _unevenness
from penstock.profiler.combine import combine_profiles
from penstock.profiler.layer_seconds import layer_seconds, middle_half
from penstock.profiler.quiet import quiet_sample
from penstock.profiler.sampling import PATIENCE, Peers, collect, no_progress


def test_layers_add_up_to_about_the_whole_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)))
    example = torch.randn(512, 256)
    found = penstock.profile(model, example, loss=lambda out, _: out.square().mean(), repetitions=2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    spent = []
    for _ in range(20):
        begun = time.process_time()
        model(example).square().mean().backward()
        spent.append(time.process_time() - begun)
    torch.set_num_threads(before)
    # A wide berth: the machine may be busy, and CPU seconds are fewer than those on the wall.
    assert 0.2 < sum(layer.seconds for layer in found.layers) / float(np.median(spent)) < 20


@pytest.mark.parametrize("name", ["resnet", "unet", "lstm", "dicts", "used twice", "tied", "frozen", "loss inside"])
def test_models_of_every_kind(name):
    model, inputs = born(name), ZOO[name].inputs(4, 6)
    found = penstock.profile(
        model, inputs, loss=score, repetitions=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )
    assert all(layer.forward >= 0 and layer.full_backward >= 0 for layer in found.layers)
    assert all(layer.input_grad + layer.weight_grad >= 0.999 * layer.full_backward for layer in found.layers)
    named = dict(model.named_parameters())
    assert sum(layer.parameter_bytes for layer in found.layers) == sum(8 * p.numel() for p in named.values())
    trained = [p for p in named.values() if p.requires_grad]
    assert sum(layer.optimizer_bytes for layer in found.layers) == sum(8 * p.numel() for p in trained)
    assert penstock.Profile.from_json(found.to_json()) == found


seconds = st.floats(1e-4, 1.0)


@given(
    layers=st.lists(st.tuples(seconds, seconds, seconds), min_size=3, max_size=9),
    own=st.tuples(st.floats(0, 1e-2), st.floats(0, 1e-2)),
    noise=st.lists(st.floats(0.99, 1.01), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_what_stages_take_for_themselves_is_told_apart(layers, own, noise):
    """From stages of one layer and from two stages, noise scaling both alike, the layers' own seconds come back."""
    forward, input_grad, weight_grad = np.array(layers).T
    seconds = np.array([forward, input_grad + weight_grad, forward, input_grad, weight_grad])
    mine = np.array([own[0], own[1], own[0], own[1], 0.0])[:, None]
    cut, scale = len(layers) // 2, np.array(noise)[:, None, None]
    two = np.stack([half.sum(axis=1) for half in (seconds[:, :cut], seconds[:, cut:])], axis=1) + mine
    found = layer_seconds(scale * (seconds + mine), scale * two, cut)
    about = {"rtol": 0.02, "atol": 1e-9}
    np.testing.assert_allclose(found.forward, seconds[0], **about)
    np.testing.assert_allclose(found.backward, seconds[1], **about)
    np.testing.assert_allclose(found.input_grad, input_grad, **about)
    np.testing.assert_allclose(found.weight_grad, weight_grad, **about)
    np.testing.assert_allclose((found.per_stage.forward, found.per_stage.backward), own, **about)


seconds_of_layers = st.lists(seconds, min_size=5 * 5, max_size=5 * 5)


@given(fine=seconds_of_layers, two=st.lists(st.floats(0.1, 1.0), min_size=10, max_size=10), cut=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_each_half_takes_what_its_stage_took_whatever_its_layers_took_alone(fine, two, cut):
    """A layer by itself may find its memory slower than in a stage: only how they compare is taken from that."""
    halves = np.array(two).reshape(1, 5, 2)
    found = layer_seconds(np.array(fine).reshape(1, 5, 5), halves, cut)
    own = found.per_stage
    for half, layers in enumerate((slice(0, cut), slice(cut, 5))):
        forward, backward = found.forward[layers].sum() + own.forward, found.backward[layers].sum() + own.backward
        assert forward == pytest.approx(max(halves[0, 0, half], own.forward))
        assert backward == pytest.approx(max(halves[0, 1, half], own.backward))


def test_slow_moments_count_and_odd_samples_do_not():
    """Four samples, one of them of another kind: the seconds are the mean of the two in the middle, layer by layer."""
    fine = np.ones((4, 5, 3))
    fine[0, :, 0] = 1.5  # a slow moment of one layer
    fine[2] = 9.0
    fine[3] = 0.5
    assert middle_half(fine, None).tolist() == [1, 0]
    assert layer_seconds(fine, None).forward.tolist() == [1.25, 1.0, 1.0]


@given(
    fine=st.lists(st.lists(st.floats(0, 1), min_size=15, max_size=15), min_size=1, max_size=4),
    two=st.lists(st.floats(0, 1), min_size=10, max_size=10),
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_measured_gives_seconds_that_a_profile_accepts(fine, two):
    halves = np.tile(np.array(two).reshape(5, 2), (len(fine), 1, 1))
    found = layer_seconds(np.array(fine).reshape(-1, 5, 3), halves, 1)
    for part in found[:5]:
        assert np.isfinite(part).all()
        assert (part >= 0).all()
    assert (found.input_grad + found.weight_grad >= found.backward * (1 - 1e-9)).all()
    assert min(found.per_stage.forward, found.per_stage.backward) >= 0


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_samples_that_others_disturb_are_told(tmp_path):
    """`root` is a process that has no part in it: all the work is then a stranger's."""
    with quiet_sample(root=1 << 22) as sample:
        spin(0.3)
    assert sample.foreign > 0.2
    assert not sample.quiet
    stranger = Peers(root=1 << 22)
    shown = []
    found = collect(lambda: np.array([time.perf_counter()]), 2, stranger, lambda *count: shown.append(count))
    assert found.disturbed == 2
    assert len(found.quiet) == PATIENCE * 2
    assert len(found.used) == 2
    assert shown[-1] == (PATIENCE * 2, PATIENCE * 2)


def test_a_profile_counts_what_was_disturbed_and_says_noisy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = measure_profile(
        model, torch.randn(2, 4), None, loss=lambda result, _: result.mean(), optimizer=None, precision=None,
        microbatches=1, repetitions=1, threads=1, seed=0, peers=Peers(root=1 << 22),
    )  # fmt: skip
    assert (found.profile.repetitions, found.profile.disturbed) == (1, 1)
    assert (found.taken, found.quiet) == (PATIENCE, 0)
    assert any(line.startswith("NOISY: 1 disturbed samples had to be used") for line in notes(found))


def test_company_decides_together():
    """What one finds disturbed is disturbed for all."""

    def gather(data):
        return [data, b"[0.7, false]"] if data else [data, b""]

    found = collect(lambda: np.zeros(1), 1, Peers(gather), no_progress)
    assert not found.quiet.any()
    assert (found.foreign >= 0.7).all()


def test_profiles_of_several_processes_are_joined_by_medians():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = [penstock.profile(model, torch.randn(2, 4), loss=lambda out, _: out.mean(), repetitions=1) for _ in range(3)]
    one = combine_profiles(made)
    assert one.busy == 3
    assert one.layers[1].forward == sorted(profile.layers[1].forward for profile in made)[1]
    assert one.layers[0].kept_bytes == made[0].layers[0].kept_bytes
    assert one.samples == 2


class Exponential(nn.Module):
    """Its weight is made of another: backwards cannot be given a newer one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x):
        return x @ self.weight.exp()


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_newer_weights_take_is_measured_where_a_model_allows_them(layers):
    def found(kind):
        model = nn.Sequential(*(kind() for _ in range(layers)))
        return penstock.profile(model, torch.randn(4, 8), loss=lambda out, _: out.square().mean(), repetitions=1)

    assert 0 <= found(lambda: nn.Linear(8, 8)).newest < 50
    assert found(Exponential).newest == 0


def test_alone_a_stage_counts_what_runs_as_most_of_a_mini_batch_does():
    """F0 F1 B0 F2 B1 F3 B2 F4 B3 B4: forwards that follow a backward, and backwards that follow a forward."""
    order = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "F4", "B3", "B4"]
    after = {word: before for before, word in pairwise(order)}
    assert [f"F{part}" for part in _later(Op.F, 5, True)] == [
        w for w in order[2:] if w[0] == "F" and after[w][0] == "B"
    ]
    assert [f"B{part}" for part in _later(Op.B, 5, True)] == ["B1", "B2", "B3"]  # the first makes the gradients' memory
    assert list(_later(Op.F, 3, False)) == [1, 2]
    assert [list(_later(Op.B, seen, True)) for seen in (1, 2, 3)] == [[], [1], [1]]


@given(seconds=st.floats(1e-4, 1.0), off=st.floats(-0.5, 0.5))
def test_unevenness_is_the_square_of_how_far_neighbours_are_apart(seconds, off):
    """Of two independent ones, the square of what is between them is twice that of what one deviates by."""
    read = {(op, 0, part): seconds * (1 + (-1) ** part * off) for op in (Op.F, Op.B) for part in range(3)}
    found = _unevenness(read, {op: range(1, 3) for op in (Op.F, Op.B)})
    assert found == pytest.approx((2 * off) ** 2 / 2)
    assert _unevenness(read, {op: range(1, 2) for op in (Op.F, Op.B)}) == 0.0
