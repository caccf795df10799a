"""The change of weights between versions: a running mean for PipeMare's correction, and last steps for forecasts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Drift:
    """delta(t+1) = g * delta(t) + (1 - g) * (w(t+1) - w(t)), and the weights corrected by it.

    `delay` is tau_fwd - tau_bkwd, in updates; g = D ** (1 / delay). An update overwrites w(t), so the two terms of the
    difference are added before and after it.
    """

    def __init__(self, weights: Sequence[Tensor], delay: float, decay: float) -> None:
        self.delay, self.keep = delay, decay ** (1 / delay)
        self.delta = [torch.zeros_like(weight) for weight in weights]
        self.spare = [torch.empty_like(weight) for weight in weights]
        # the weights that `spare` was computed from, while they are valid
        self.corrected_from: list[Tensor] | None = None

    def forget(self) -> None:
        """Discard the corrected weights: the weights have changed."""
        self.corrected_from = None

    def before_update(self, before: list[Tensor]) -> None:
        self.forget()
        if self.delta:
            torch._foreach_mul_(self.delta, self.keep)
            torch._foreach_add_(self.delta, before, alpha=self.keep - 1)

    def after_update(self, after: list[Tensor]) -> None:
        self.forget()
        if self.delta:
            torch._foreach_add_(self.delta, after, alpha=1 - self.keep)

    def corrected(self, weights: list[Tensor]) -> list[Tensor]:
        """Return w - delay * delta, in a buffer that the next version reuses. All backwards of a version share it."""
        if self.delta and self.corrected_from is not weights:
            self.corrected_from = weights
            torch._foreach_copy_(self.spare, weights)
            torch._foreach_add_(self.spare, self.delta, alpha=-self.delay)
        return self.spare


class Steps:
    """The step that led to each version, or the step expected after it."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.by_version: dict[int, list[Tensor]] = {}
        self.newest = 0
        self.begun: list[Tensor] = []

    def before_update(self, before: list[Tensor]) -> None:
        self.begun = [-tensor for tensor in before]

    def after_update(self, after: list[Tensor], version: int) -> None:
        if self.begun:
            torch._foreach_add_(self.begun, after)
        self.set_steps(self.begun, version)

    def set_steps(self, steps: list[Tensor], version: int) -> None:
        self.by_version[version], self.newest = steps, version

    def of(self, version: int) -> list[Tensor] | None:
        """Return the step of a version; None before the first step."""
        return self.by_version.get(version)

    def trim(self, oldest: int) -> None:
        for version in [version for version in self.by_version if version < min(oldest, self.newest)]:
            del self.by_version[version]

    def restart(self) -> None:
        """Begin a new run with the newest version as its first."""
        self.resume(self.by_version.get(self.newest))

    def resume(self, last: list[Tensor] | None) -> None:
        """Begin a new run with the version that this step led to."""
        self.by_version, self.newest = ({} if last is None else {0: last}), 0
