"""Delayed SGD on f(w) = lam * w**2 / 2: where it turns unstable, by the roots of its recursion and by running it.

A step from weights that the forward saw `tf` steps ago and the backward `tb` steps ago:

    w(t+1) = w(t) - lr * ((lam + sense) * w(t - tf) - sense * u(t - tb))

`sense` (the paper's Delta) tells how much the gradient minds that forward and backward differ. u = w; with T2
u = w - (tf - tb) * delta, delta(t+1) = g * delta(t) + (1 - g) * (w(t+1) - w(t)). Putting w(t) = z**t gives the
polynomial; the recursion is stable where no root lies outside the unit circle. Coefficients: highest power first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, pi, sin

import torch
from torch import Tensor


@dataclass(frozen=True)
class Delays:
    """The recursion without its rate. `g` None: no T2."""

    tf: int
    tb: int = 0
    sense: float = 0.0
    g: float | None = None
    lam: float = 1.0


def best_g(tau: float) -> float:
    """The paper's g*."""
    return 1 - 2 / (tau + 1)


def default_g(tau: float, d: float = exp(-2)) -> float:
    return d ** (1 / tau)


def threshold(tau: int, lam: float = 1.0) -> float:
    """The largest stable rate of delayed SGD, in closed form."""
    return 2 / lam * sin(pi / (4 * tau + 2))


def polynomial(law: Delays, lr: float) -> Tensor:
    """z**tf (z-1) - lr sense z**(tf-tb) + lr (lam+sense); with T2 all times z-g, less T2's part."""
    gap = law.tf - law.tb
    step = power(law.tf + 1) - power(law.tf, law.tf + 1)
    forward = lr * (law.lam + law.sense) * power(0, law.tf + 1)
    backward = lr * law.sense * power(gap, law.tf + 1)
    if law.g is None:
        return step + forward - backward
    corrected = lr * law.sense * gap * (1 - law.g) * power(gap, law.tf + 1)
    return times(step + forward - backward, law.g) + times(corrected, 1.0)


def power(exponent: int, degree: int | None = None) -> Tensor:
    """z**exponent as a polynomial of that degree."""
    coefficients = torch.zeros((exponent if degree is None else degree) + 1, dtype=torch.float64)
    coefficients[-1 - exponent] = 1.0
    return coefficients


def times(coefficients: Tensor, root: float) -> Tensor:
    """A polynomial times (z - root)."""
    zero = coefficients.new_zeros(1)
    return torch.cat([coefficients, zero]) - root * torch.cat([zero, coefficients])


def radius(law: Delays, lr: float) -> float:
    """The largest root's size: eigenvalues of the companion matrix."""
    coefficients = polynomial(law, lr)
    companion = torch.diag(torch.ones(len(coefficients) - 2, dtype=torch.float64), -1)
    companion[0] = -coefficients[1:] / coefficients[0]
    return torch.linalg.eigvals(companion).abs().max().item()


def first_unstable(law: Delays, lowest: float = 1e-3, growth: float = 1.02) -> float:
    """The smallest rate at which a root leaves the unit circle: upwards in steps of 2%, then halving the last."""
    return crossing(lambda lr: radius(law, lr) > 1 + 1e-9, lowest, growth)


def crossing(unstable: Callable[[float], bool], lowest: float, growth: float) -> float:
    high = lowest
    while not unstable(high):
        high *= growth
    low = high / growth
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if unstable(middle) else (middle, high)
    return high


def path(law: Delays, lr: float, steps: int, start: float = 1.0) -> list[float]:
    """The recursion itself, from a weight that has always been `start`."""
    reach = law.tf + 1
    w, delta = [start] * reach, [0.0] * reach
    for _ in range(steps):
        u = w[-1 - law.tb] - (law.tf - law.tb) * delta[-1 - law.tb] * (law.g is not None)
        w.append(w[-1] - lr * ((law.lam + law.sense) * w[-1 - law.tf] - law.sense * u))
        g = law.g or 0.0
        delta.append(g * delta[-1] + (1 - g) * (w[-1] - w[-2]))
    return w[reach:]


def grows(law: Delays, lr: float, steps: int) -> bool:
    """Whether the second half of a path reaches farther out than its first."""
    sizes = [abs(w) for w in path(law, lr, steps)]
    return max(sizes[steps // 2 :]) > max(sizes[: steps // 2])
