"""What every rank knows of every other before lanes are opened, and the transport that follows from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock.engine.transport import memory, semaphore
from penstock.engine.transport.lane import LaneName, Waiting
from penstock.errors import InputError

CHOICES = ("shared", "gloo")
VARIABLE = "PENSTOCK_TRANSPORT"


class World(Protocol):
    """What is asked of the world of ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def hosts(self) -> tuple[str, ...]: ...
    @property
    def store(self) -> Store: ...
    @property
    def watch(self) -> Waiting: ...
    def gather(self, data: bytes) -> list[bytes]: ...


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself, for all to decide by."""

    host: str
    gpu: str | None  # what tells one GPU of a host from another
    nccl: bool
    wish: str | None  # the transport that the user wants
    lanes: str  # a digest: all ranks have to mean the same ones
    shared: bool = True  # its system has what shared memory is made of


def exchange(
    world: World, ends: Mapping[LaneName, tuple[int, int]], device: torch.device, wish: str | None
) -> list[Facts]:
    """The facts of all ranks, of which they agree on lanes and wish."""
    digest = hashlib.sha256(repr(sorted(ends.items())).encode()).hexdigest()[:16]
    nccl = device.type == "cuda" and dist.is_nccl_available()
    shared = memory.is_there() and semaphore.is_there()
    mine = Facts(world.hosts[world.rank], _gpu(device), nccl, wish, digest, shared)
    facts = [Facts(**json.loads(said)) for said in world.gather(json.dumps(asdict(mine)).encode())]
    for rank, fact in enumerate(facts):
        if fact.lanes != facts[0].lanes:
            raise InputError(
                "all ranks to have the same lanes between stages",
                f"others on rank {rank} than on rank 0",
                "give every rank the same model, number of stages and schedule",
            )
        if fact.wish != facts[0].wish:
            raise InputError(
                "the same transport on every rank",
                f"{facts[0].wish} on rank 0 and {fact.wish} on rank {rank}",
                f"set transport= (or {VARIABLE}) alike on every rank",
            )
    return facts


def kind(a: Facts, b: Facts) -> str:
    """The transport between two different ranks."""
    near = a.host == b.host
    if a.wish == "shared" and not near:
        raise InputError(
            "all ranks on one host for transport='shared'", "ranks on different hosts", "leave the transport out"
        )
    if a.wish == "shared" and not (a.shared and b.shared):
        came = "a system without memory files and semaphores that processes can share"
        raise InputError("Linux for transport='shared'", came, "leave the transport out")
    if a.wish is not None:
        return a.wish
    if a.nccl and b.nccl and not (near and a.gpu == b.gpu):
        return "nccl"
    return "shared" if near and a.shared and b.shared else "gloo"


def wish_of(transport: str | None) -> str | None:
    """What the user wants: the argument, or the environment."""
    wish = transport or os.environ.get(VARIABLE) or None
    if wish is not None and wish not in CHOICES:
        source = "transport=" if transport else VARIABLE
        raise InputError(f"{source} to be one of {', '.join(CHOICES)}", repr(wish), "correct it or leave it out")
    return wish


def _gpu(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
