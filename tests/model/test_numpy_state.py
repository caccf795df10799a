"""NumPy's global state comes back whole, half a pair of normal numbers included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.seeding import random_states_kept

DRAWS = {
    "normal": np.random.normal,
    "uniform": np.random.random,
    "whole": lambda: np.random.randint(1 << 30),
    "seed": lambda: np.random.seed(7),
    "many": lambda: np.random.random(700),
}
words = st.lists(st.sampled_from(sorted(DRAWS)), max_size=6)


def draw(names):
    return [np.sum(DRAWS[name]() or 0.0) if name != "many" else DRAWS[name]().sum() for name in names]


@pytest.fixture(autouse=True)
def kept():
    before = np.random.get_state()
    yield
    np.random.set_state(before)


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_what_is_drawn_in_between_leaves_no_trace(seed, turns):
    """Each turn: the user draws, then somebody in between does."""
    np.random.seed(seed)
    wanted = [draw(mine) for mine, _ in turns] + [draw(["normal", "normal"])]
    np.random.seed(seed)
    found = []
    for mine, between in turns:
        found.append(draw(mine))
        with random_states_kept(torch.device("cpu")):
            np.random.seed(3)
            draw(between)
    assert [*found, draw(["normal", "normal"])] == wanted


def test_half_a_pair_is_kept_though_the_same_numbers_were_met_without_it():
    """Once the numbers alone were compared with those met before: the second normal number of a pair was lost."""
    np.random.seed(7)
    np.random.normal()
    np.random.normal()
    with random_states_kept(torch.device("cpu")):
        pass
    np.random.seed(7)
    np.random.normal()
    expected = np.random.normal()
    np.random.seed(7)
    np.random.normal()
    with random_states_kept(torch.device("cpu")):
        np.random.normal()
    assert np.random.normal() == expected
