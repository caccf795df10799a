"""Versions against a plain list of values: what a live forward holds, or a coming one names, is never overwritten."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.engine.weights.versions import Key, Versions

torch.set_num_threads(1)


@dataclass
class Plainly:
    """Every version's value by its number, the live forwards, and the oldest version that will still be named."""

    values: list[float] = field(default_factory=lambda: [1.0])
    live: list[Key] = field(default_factory=list)
    oldest: int = 0

    def of(self, key: Key) -> float:
        """Forecasts go ahead by a step that is told apart for each version."""
        return self.values[key.version] + key.ahead * step(key.version)

    def needed(self) -> set[Key]:
        newest = len(self.values) - 1
        return {Key(v) for v in range(min(self.oldest, newest), newest + 1)} | set(self.live)


def step(version: int) -> float:
    return 0.125 * (version + 1)


def filled(value: float) -> list[Tensor]:
    return [torch.full((2,), value), torch.full((3, 1), value)]


def shown(versions: Versions) -> float:
    seen = {number for parameter in versions.parameters for number in parameter.data.flatten().tolist()}
    assert len(seen) == 1
    return seen.pop()


# What a stage may do: a forward on the version that it names (later ones never name an older one), or on a forecast
# from it; a backward of any live one; an update.
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["forward", "forecast", "backward", "update"]), st.integers(0, 3)), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_every_action_sees_its_version(actions):
    versions = Versions([nn.Parameter(tensor) for tensor in filled(1.0)])
    plain = Plainly()
    for action, number in actions:
        newest = len(plain.values) - 1
        if action in ("forward", "forecast"):
            plain.oldest = min(plain.oldest + number, newest)
            key = Key(plain.oldest, number if action == "forecast" else 0)
            if key.ahead:
                versions.forecast(key, filled(step(key.version)))
            versions.show(key)
            assert shown(versions) == plain.of(key)
            versions.hold(key)
            plain.live.append(key)
        elif action == "backward" and plain.live:
            key = plain.live.pop(number % len(plain.live))
            versions.show(key)
            assert shown(versions) == plain.of(key)
            versions.release(key)
            versions.trim(plain.oldest)
        elif action == "update":
            versions.show_newest()
            versions.advance(plain.oldest)
            assert shown(versions) == plain.values[-1]
            for parameter in versions.parameters:
                parameter.data.mul_(-1.5).add_(number)
            plain.values.append(plain.values[-1] * -1.5 + number)
        check(versions, plain)
    versions.show_newest()
    versions.restart()
    assert shown(versions) == plain.values[-1]
    assert versions.bytes == 4 * 5


def check(versions: Versions, plain: Plainly) -> None:
    """What is needed is there, in memory of its own, with its values."""
    assert plain.needed() <= versions.data.keys()
    every = [*versions.data.values(), *versions.spare]
    assert len({tensors[0].data_ptr() for tensors in every}) == len(every)
    assert versions.bytes == len(every) * 4 * 5
    for key in plain.needed():
        assert {number for tensor in versions.data[key] for number in tensor.flatten().tolist()} == {plain.of(key)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 30))
def test_a_stage_with_so_many_forwards_ahead_has_one_buffer_more(ahead, m, rounds):
    """One forward, one backward, an update after each m-th: as many versions as there are mini-batches in flight."""
    versions = Versions([nn.Parameter(torch.ones(3))])
    held: dict[int, Key] = {}
    most = 0
    for number in range(rounds * m + ahead):
        key = Key(max(0, (number - ahead) // m))
        versions.show(key)
        versions.hold(key)
        held[number] = key
        if number >= ahead:
            versions.release(held.pop(number - ahead))
            coming = max(0, (number + 1 - ahead) // m)
            versions.trim(coming)
            if (number - ahead) % m == m - 1:
                versions.show_newest()
                versions.advance(coming)
        most = max(most, versions.bytes // 12)
    assert most <= -(-ahead // m) + 1
    if rounds > ahead:
        assert most == -(-ahead // m) + 1


def test_a_version_that_nobody_holds_is_updated_where_it_is():
    weight = nn.Parameter(torch.ones(3))
    versions, place = Versions([weight]), weight.data_ptr()
    for version in range(1, 4):
        versions.advance(version)
        assert weight.data_ptr() == place
        assert versions.bytes == 12


def test_versions_of_no_weights():
    versions = Versions([])
    versions.hold(Key(0))
    versions.advance(0)
    versions.forecast(Key(1, 2), [])
    versions.show(Key(0))
    versions.release(Key(0))
    versions.trim(1)
    assert versions.bytes == 0
    assert versions.newest == 1
