"""NumPy's global state comes back whole, half a pair of normal numbers included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import numpy_state

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
        state = numpy_state.save()
        np.random.seed(3)
        draw(between)
        numpy_state.restore(state)
    assert [*found, draw(["normal", "normal"])] == wanted


def test_the_numbers_alone_are_kept_where_there_is_no_half_pair():
    np.random.seed(1)
    numpy_state.save()
    assert isinstance(numpy_state.save(), bytes)
    np.random.normal()
    assert isinstance(numpy_state.save(), tuple)
    np.random.normal()
    assert isinstance(numpy_state.save(), bytes)


def test_another_generator_than_the_usual_one_is_never_written_into():
    usual, state = np.random.get_bit_generator(), numpy_state.save()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        with pytest.raises(ValueError, match="PCG64"):
            numpy_state.restore(state if isinstance(state, bytes) else bytes(numpy_state.BYTES))
    finally:
        np.random.set_bit_generator(usual)
