"""The colours can be told apart, also by colour-blind readers, and what is written on them can be read."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from penstock.core.action import Op
from penstock.core.memory import MemoryKind
from penstock.reports.describe import KIND_WORDS, LETTERS, WORDS
from penstock.reports.palette import FILLS, KIND_FILLS, STACK, contrast, ink, rgb, shade

# Machado, Oliveira and Fernandes 2009, severity 1.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deutan": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritan": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def lab(colour: str, blindness: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as it is seen."""
    part = np.array(rgb(colour)) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    seen = np.clip(blindness @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-9))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_operations_are_told_apart(blindness):
    for one, other in combinations((Op.F, Op.B, Op.I, Op.W, Op.UPDATE), 2):
        apart = np.linalg.norm(lab(FILLS[one], BLINDNESS[blindness]) - lab(FILLS[other], BLINDNESS[blindness]))
        assert apart > 15, f"{one.name} and {other.name}"


def test_numbers_can_be_read_on_every_shade():
    for op in FILLS:
        for chunk in range(4):
            fill = shade(op, chunk, 4)
            assert contrast(ink(fill), fill) >= 4.5


def test_later_chunks_are_paler():
    assert shade(Op.F, 0, 1) == shade(Op.F, 0, 3) == FILLS[Op.F]
    brightness = [sum(rgb(shade(Op.B, chunk, 3))) for chunk in range(3)]
    assert brightness == sorted(set(brightness))


def test_everything_has_a_colour_and_words():
    assert set(FILLS) == set(WORDS) == set(LETTERS) == set(Op)
    assert set(KIND_FILLS) == set(KIND_WORDS) == set(STACK) == set(MemoryKind)
