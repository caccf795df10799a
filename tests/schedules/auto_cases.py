"""Random costs and memory caps for `auto`, and the best that a named method does with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from penstock import InputError
from penstock.core.cost import Costs, flat_costs
from penstock.core.schedule import Schedule
from penstock.core.timeline import Timeline
from penstock.schedules.registry import schedule
from penstock.simulator.simulate import simulate_costs

PLACEMENTS = {"straight": 1, "v": 2, "interleaved": 2}
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Case:
    """One set of costs. `numbers` are those of `flat_costs`."""

    placement: str
    stages: int
    microbatches: int
    memory: float | tuple[float, ...]
    numbers: dict[str, object]

    def auto(self, **options: object) -> Schedule:
        return self._build("auto", memory=self.memory, placement=self.placement, **self.numbers, **options)

    def time(self, built: Schedule) -> Timeline:
        return simulate_costs(built, self.costs(built))

    def costs(self, built: Schedule) -> Costs:
        return flat_costs(built.shape, **self.numbers)

    def fits(self, line: Timeline) -> bool:
        return bool((line.peak_activations <= self.memory + 1e-9 * line.peak_activations).all())

    def best_named(self) -> float:
        """The least makespan of a named method of this placement that fits, infinite where none does."""
        lines = [self.time(built) for built in self._named()]
        return min((line.makespan for line in lines if self.fits(line)), default=math.inf)

    def _named(self) -> list[Schedule]:
        if self.placement == "straight":
            tops = {"pa": self.stages, "pb": 2 * self.stages - 1}  # a higher cap changes nothing
            caps = [(policy, cap + 1) for policy, top in tops.items() for cap in range(min(self.microbatches, top))]
            early = [self._build("dapple", policy=policy, cap=cap) for policy, cap in caps]
            return early + [self._build(name) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")]
        names = ["interleaved"] if self.placement == "interleaved" else ["zb-v", "dualpipe-v"]
        built = []
        for name in names:
            try:
                built.append(self._build(name))
            except InputError:  # a number of micro-batches that the method does not take
                continue
        return built

    def _build(self, name: str, **options: object) -> Schedule:
        chunks = PLACEMENTS[self.placement]
        return schedule(name, stages=self.stages, microbatches=self.microbatches, chunks=chunks, **options)


def draw(random: Random, placement: str, stages: tuple[int, int], microbatches: tuple[int, int]) -> Case:
    """Unequal costs, by rank and kind, with and without transfers; memory from plenty to hardly any."""
    p, m = random.randint(*stages), random.randint(*microbatches)
    if placement == "interleaved":
        m = -(-m // p) * p
    spread, slow = random.choice((1.3, 2.0, 4.0)), random.choice((0.0, 0.2, 1.0))
    numbers: dict[str, object] = {
        kind: [random.uniform(1.0, spread) for _ in range(p)] for kind in ("forward", "input_grad", "weight_grad")
    }
    numbers["transfer"] = [random.uniform(0.0, slow) for _ in range(p)]
    numbers["weight_grad_memory"] = random.choice((0.3, 0.5, 1.0))
    memory = random.choice((math.inf, math.inf, 2.0 * p, float(p), (p + 1) / 2))
    return Case(placement, p, m, memory, numbers)
