"""A plan: how a model is cut into stages, placed on devices and scheduled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.arguments import named_fields
from penstock.core.validation import from_json_of, truth, whole
from penstock.errors import InputError


@named_fields
@dataclass(frozen=True)
class StagePlan:
    """One stage: its layers `first` to `last` inclusive, and whether it recomputes or offloads activations."""

    first: int
    last: int
    recompute: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        whole("the first layer of a stage", self.first, 0)
        whole("the last layer of a stage", self.last, 0)
        truth("recompute of a stage", self.recompute)
        truth("offload of a stage", self.offload)


@named_fields
@dataclass(frozen=True)
class Plan:
    """Stages in model order, the rank of each, and the devices of each slot of each rank.

    `devices[rank][replica]` lists the devices of that slot: one, or its tensor group. Tensor parallelism is part of the
    plan only; schedules do not represent it.
    """

    stages: tuple[StagePlan, ...]
    placement: tuple[int, ...]
    devices: tuple[tuple[tuple[int, ...], ...], ...]
    schedule: str
    microbatches: int
    batches: int = 1
    options: tuple[tuple[str, Any], ...] = ()  # of the schedule, as sorted pairs

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("a plan with at least one stage", "none", "complete the plan")
        if len(self.stages) != len(self.placement):
            raise InputError(
                f"one rank for each of {len(self.stages)} stages", len(self.placement), "complete the plan"
            )
        if set(self.placement) != set(range(len(self.devices))):
            raise InputError(
                f"ranks 0 to {len(self.devices) - 1} in the placement", sorted(set(self.placement)), "correct the plan"
            )
        for before, stage in zip((None, *self.stages), self.stages, strict=False):
            expected = 0 if before is None else before.last + 1
            if stage.first != expected or stage.last < stage.first:
                raise InputError(
                    f"a stage that begins at layer {expected} and holds at least one",
                    (stage.first, stage.last),
                    "give every layer to exactly one stage, in order",
                )
        taken = [device for rank in self.devices for slot in rank for device in slot]
        if len(taken) != len(set(taken)) or not all(rank and all(rank) for rank in self.devices):
            raise InputError("each slot to have devices of its own", self.devices, "give every slot different devices")

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(len(rank) for rank in self.devices)

    @property
    def chunks(self) -> int:
        return len(self.stages) // self.ranks

    @property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of the layers at which the second, third, ... stage begins."""
        return tuple(stage.first for stage in self.stages[1:])

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Devices of every slot, in the order of a schedule's slots."""
        return tuple(slot for rank in self.devices for slot in rank)

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "placement": list(self.placement),
            "devices": [[list(slot) for slot in rank] for rank in self.devices],
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "batches": self.batches,
            "options": dict(self.options),
        }

    @classmethod
    @from_json_of("plan")
    def from_json(cls, data: dict[str, Any]) -> Plan:
        return cls(
            stages=tuple(StagePlan(**stage) for stage in data["stages"]),
            placement=tuple(whole("the rank of a stage", rank, 0) for rank in data["placement"]),
            devices=tuple(tuple(tuple(map(_device, slot)) for slot in rank) for rank in data["devices"]),
            schedule=data["schedule"],
            microbatches=data["microbatches"],
            batches=whole("batches", data["batches"]),
            options=tuple(sorted(data["options"].items())),
        )


def _device(number: object) -> int:
    return whole("the number of a device", number, 0)
