"""An estimated profile: a measured one in all but seconds, which grow with work and shrink with faster devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from model.zoo import ZOO, born, score
from penstock import InputError
from penstock.core.cluster_presets import KINDS
from penstock.model.materialise import weightless
from penstock.models.gpt import GPT
from penstock.profiler.devices import ARITHMETICS, MACHINES, Roof, machine_of
from penstock.profiler.operations import OperatorCall, OperatorKind
from penstock.profiler.roofline import seconds_of

TIMES = {"forward": 0.0, "input_grad": 0.0, "weight_grad": 0.0, "update": 0.0, "full_backward": 0.0, "spread": 0.0}
TOKENS = torch.arange(24).reshape(4, 6) % 19


def gpt():
    torch.manual_seed(3)
    return GPT(vocab=19, width=16, heads=2, layers=4, length=6)


def tokens_loss(result, target):
    return F.cross_entropy(result.flatten(0, 1), target.flatten())


def but_times(profile):
    layers = tuple(replace(layer, **TIMES) for layer in profile.layers)
    return layers, profile.edges, profile.sent, profile.samples


@pytest.mark.parametrize("name", ["sequential", "resnet", "unet", "tied", "frozen", "used twice", "many inputs", "t5"])
def test_what_is_no_time_is_as_measured(name):
    """Layers, edges, all that is sent, kept, and held by weights and optimizer: as a measurement with real weights."""
    if ZOO[name].transformers:
        pytest.importorskip("transformers")
    model, inputs = born(name), ZOO[name].inputs(4, 6)
    given = {"loss": score, "optimizer": torch.optim.AdamW}
    measured = penstock.profile(model, inputs, repetitions=1, **given)
    found = penstock.estimate(model, inputs, "cpu", **given)
    assert but_times(found) == but_times(measured)
    assert all(layer.forward > 0 for layer in found.layers)


def test_weights_are_not_needed_and_not_touched():
    model = gpt()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.head.weight.grad = marker = torch.ones_like(model.head.weight)
    chance = torch.random.get_rng_state()
    given = {"loss": tokens_loss, "target": TOKENS, "optimizer": torch.optim.AdamW}
    found = penstock.estimate(model, TOKENS, "h100", **given)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.head.weight.grad is marker
    assert torch.equal(chance, torch.random.get_rng_state())
    with weightless():
        empty = gpt()
    assert penstock.estimate(empty, TOKENS, "h100", **given) == found
    with torch.device("meta"):
        hollow = gpt()
    assert penstock.estimate(hollow, TOKENS, "h100", **given) == found


def test_statistics_of_a_norm_stay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    before = [buffer.clone() for buffer in model.buffers()]
    penstock.estimate(model, torch.randn(2, 3, 8, 8), "a100")
    assert all(map(torch.equal, before, model.buffers()))


def test_it_is_a_profile_that_can_be_written_and_planned():
    found = penstock.estimate(gpt(), TOKENS, "a100")
    assert penstock.Profile.from_json(found.to_json()) == found
    planned = penstock.plan(found, penstock.read_cluster("dgx-a100"), method="balance", stages=2)
    assert len(planned.plan.stages) == 2
    assert planned.step_seconds > 0


@pytest.mark.parametrize(
    ("make", "a_parameter"),
    [
        (torch.optim.SGD, 0),
        (lambda ps: torch.optim.SGD(ps, momentum=0.9), 4),
        (torch.optim.AdamW, 8),
        (lambda names, ps: torch.optim.AdamW(ps, amsgrad=True), 12),
    ],
)
def test_an_optimizers_state_and_update(make, a_parameter):
    """Besides counts of steps, one number for each tensor."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[1].bias.requires_grad_(False)
    found = penstock.estimate(model, torch.zeros(2, 8), "h100", optimizer=make)
    sizes = [(8 * 16 + 16, 2), (16 * 4, 1)]
    steps = 0 if a_parameter < 8 else 4
    assert [one.optimizer_bytes for one in found.layers] == [a_parameter * n + steps * count for n, count in sizes]
    assert all(layer.update > 0 for layer in found.layers)
    assert penstock.estimate(model, torch.zeros(2, 8), "h100").layers[0].update == 0


def test_a_loss_is_part_of_the_last_layer_and_low_precision_is_faster():
    model, x, y = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.zeros(64, 512), torch.zeros(64, 512)
    bare = penstock.estimate(model, x, "a100").layers
    lossy = penstock.estimate(model, x, "a100", loss=F.mse_loss, target=y).layers
    assert lossy[0] == bare[0]
    assert lossy[1].forward > bare[1].forward
    assert lossy[1].kept_bytes == bare[1].kept_bytes + 2 * y.numel() * 4  # result and target
    big = torch.zeros(8192, 512)
    usual, low = (penstock.estimate(model, big, "a100", precision=precision).layers for precision in (None, "bf16"))
    assert sum(one.seconds for one in low) < sum(one.seconds for one in usual) / 3


def test_a_faster_device_is_never_slower():
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Embedding(19, 16), block, nn.Linear(16, 19))
    for slower, faster in (("v100-16", "a100-40"), ("a100-40", "a100-80"), ("a100", "h100"), ("h100", "h200")):
        for precision in ("fp32", "bf16"):
            times = [
                [(one.forward, one.input_grad, one.weight_grad) for one in found.layers]
                for found in (penstock.estimate(model, TOKENS, kind, precision=precision) for kind in (slower, faster))
            ]
            assert all(b <= a for old, new in zip(*times, strict=True) for a, b in zip(old, new, strict=True))


work = st.integers(0, 10**15)
quickly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(flops=work, moved=work, more=work, kind=st.sampled_from(sorted(MACHINES)), factor=st.floats(1, 100))
@quickly
def test_more_work_takes_longer_and_a_higher_roof_less_time(flops, moved, more, kind, factor):
    machine = MACHINES[kind]
    one = OperatorCall("mm", OperatorKind.MATMUL, torch.bfloat16, flops, moved)
    took = seconds_of(machine, one)
    assert took >= machine.launch
    assert seconds_of(machine, one._replace(flops=flops + more)) >= took
    assert seconds_of(machine, one._replace(bytes=moved + more)) >= took
    raised = replace(machine, peaks={name: factor * peak for name, peak in machine.peaks.items()})
    assert seconds_of(raised, one) <= took
    assert seconds_of(replace(machine, bandwidth=factor * machine.bandwidth), one) <= took


@given(size=st.floats(1, 1e18), more=st.floats(1, 100), share=st.floats(0.1, 1), ramp=st.floats(0, 1e-3))
@quickly
def test_efficiency_grows_with_size_up_to_its_share(size, more, share, ramp):
    roof = Roof(1e12, share, ramp)
    assert 0 < roof.efficiency(size) <= roof.efficiency(more * size) * (1 + 1e-9) <= share * (1 + 1e-6)
    half = ramp * roof.peak * share
    if half > 1:
        assert roof.efficiency(half) == pytest.approx(share / 2)


def test_devices_are_those_that_clusters_know():
    assert set(MACHINES) - {"cpu"} == set(KINDS)
    assert machine_of("a100").kind == "a100-80"
    assert machine_of("h200").memory == KINDS["h200"]["memory"]
    assert all(set(machine.peaks) == set(ARITHMETICS) for machine in MACHINES.values())


class Choosy(nn.Module):
    """Looks at what it has computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x if self.layer(x).sum() > 0 else -x


MODEL, EXAMPLE = nn.Linear(4, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((MODEL, EXAMPLE, "h10"), "expected the name of a device, but got 'h10'; did you mean h100"),
        ((MODEL, EXAMPLE, "abacus"), "'abacus'; .*a100-40.*h100"),
        ((MODEL, EXAMPLE), "a device to estimate for, but got none"),
        ((MODEL, EXAMPLE, "h100", "int8"), "precision to be one of fp32, bf16, fp16, but got 'int8'"),
        (("gpt", EXAMPLE, "h100"), "an nn.Module, but got 'gpt'"),
        ((MODEL, (), "h100"), "at least one tensor that has rows"),
        ((Choosy(), EXAMPLE, "h100"), "do not depend on the numbers that it computes, but got .*test_estimate.py:"),
    ],
)
def test_what_cannot_be_estimated_gets_one_message(given, said):
    model, example, *more = given
    options = dict(zip(("device", "precision"), more, strict=False))
    with pytest.raises(InputError, match=said):
        penstock.estimate(model, example, **options)
