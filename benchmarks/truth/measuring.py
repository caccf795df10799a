"""What two processes do at the same time before there are workers: measure a model, and what joins them."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.truth.models import MODELS, cross_entropy


class Measuring:
    """Gives text, which any process can read."""

    def __init__(self, rank: int) -> None:
        from penstock.comm.world.world import join

        world = join()
        assert world is not None
        self.world = world

    def cluster(self) -> str:
        """As `penstock cluster measure` writes it; what rank 0 says counts."""
        from penstock.app.cluster.measure import measure

        return measure(self.world).to_toml()

    def profile(self, name: str, repetitions: int) -> dict[str, Any]:
        """As `penstock profile --busy` has it of each of its processes."""
        from penstock.app.profile.api import measure_profile
        from penstock.profiler.sampling import Peers

        subject = MODELS[name]
        found = measure_profile(
            subject.model(),
            *subject.example,
            loss=cross_entropy,
            optimizer=subject.optimizer,
            precision=None,
            microbatches=subject.microbatches,
            repetitions=repetitions,
            threads=1,
            seed=0,
            peers=Peers(self.world.gather, os.getppid()),
        )
        return found.profile.to_json()

    def close(self) -> None:
        """The end."""
