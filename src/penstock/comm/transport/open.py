"""Open the lanes of a rank, each over the transport that suits the location of its two ends.

    both stages on one rank         local
    as the user requests            shared, gloo, or a registered transport (registered.py)
    a GPU each, and NCCL            nccl
    one host                        shared memory, with gloo as fallback
    else                            gloo

Before that, ranks exchange the facts that decide it: host, device, and which transports each can use.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.comm.transport import nccl
from penstock.comm.transport.fallback import SharedOrGlooReceiver, SharedOrGlooSender, warn_slow
from penstock.comm.transport.gloo.mesh import GlooMesh
from penstock.comm.transport.interface import LaneName, Lanes, Receiver, Sender, Waiting
from penstock.comm.transport.local import LocalLane
from penstock.comm.transport.registered import Link, registered_transport, transport_names
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.sender import SharedSender
from penstock.comm.world.rendezvous import run_interruptible
from penstock.errors import InputError

VARIABLE = "PENSTOCK_TRANSPORT"


class TransportWorld(Protocol):
    """The attributes of the world of ranks that transports need."""

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
    """Facts about a rank by which all ranks choose the transports."""

    host: str
    gpu: str | None  # its UUID
    nccl: bool
    requested: str | None  # the transport that the user wants
    lanes: str  # a digest of all lanes: it has to be the same on all ranks
    shared: bool = True  # its system has shared memory and semaphores


def exchange(
    world: TransportWorld, ends: Mapping[LaneName, tuple[int, int]], device: torch.device, requested: str | None
) -> list[Facts]:
    """Return the facts of all ranks; raise if they disagree about the lanes or the transport."""
    digest = hashlib.sha256(repr(sorted(ends.items())).encode()).hexdigest()[:16]
    nccl = device.type == "cuda" and dist.is_nccl_available()
    shared = mapping.can_share_memory() and mapping.has_semaphores()
    own = Facts(world.hosts[world.rank], _gpu(device), nccl, requested, digest, shared)
    facts = [Facts(**json.loads(data)) for data in world.gather(json.dumps(asdict(own)).encode())]
    for rank, fact in enumerate(facts):
        if fact.lanes != facts[0].lanes:
            raise InputError(
                "all ranks to have the same lanes between stages",
                f"different ones on rank {rank} and rank 0",
                "give every rank the same model, number of stages and schedule",
            )
        if fact.requested != facts[0].requested:
            raise InputError(
                "the same transport on every rank",
                f"{facts[0].requested} on rank 0 and {fact.requested} on rank {rank}",
                f"set transport= (or {VARIABLE}) alike on every rank",
            )
    return facts


def kind(a: Facts, b: Facts) -> str:
    """Return the transport between two different ranks."""
    near = a.host == b.host
    if a.requested == "shared" and not near:
        raise InputError(
            "all ranks on one host for transport='shared'", "ranks on different hosts", "leave the transport out"
        )
    if a.requested == "shared" and not (a.shared and b.shared):
        problem = "a system without memory files and semaphores that processes can share"
        raise InputError("Linux for transport='shared'", problem, "leave the transport out")
    if a.requested is not None:
        return a.requested
    if a.nccl and b.nccl and not (near and a.gpu == b.gpu):
        return "nccl"
    return "shared" if near and a.shared and b.shared else "gloo"


def requested_transport(transport: str | None) -> str | None:
    """Return the transport that the user requests by the argument or the environment; None for a choice by location."""
    requested = transport or os.environ.get(VARIABLE) or None
    names = transport_names()
    if requested is not None and requested not in names:
        source = "transport=" if transport else VARIABLE
        raise InputError(f"{source} to be one of {', '.join(names)}", repr(requested), "correct it or leave it out")
    return requested


def _gpu(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


EVERYBODY = -1
CONNECT = 60.0  # seconds for all ranks to connect

Ends = dict[LaneName, tuple[int, int]]  # the ranks of a lane's source and target

_opened = itertools.count()  # the same on every rank: lanes are opened by all together


@dataclass
class OpenLanes(Lanes):
    """The open lanes of this rank. `kinds`: the transport of each."""

    kinds: dict[LaneName, str] = field(default_factory=dict)
    mesh: GlooMesh | None = None
    process: int = field(default_factory=os.getpid)

    def close(self, patient: bool = False) -> None:
        """Close all lanes. All ranks have to call; everything that was sent still arrives. `patient`: wait for the
        other ranks without a time-out."""
        atexit.unregister(self.leave)
        with ExitStack() as stack:
            if self.mesh is not None:
                stack.callback(self.mesh.close, patient)
            for receiver in self.receivers.values():
                stack.callback(receiver.close)
            for sender in self.senders.values():
                stack.callback(sender.close)

    def leave(self) -> None:
        """Close all lanes at the end of the process. Errors are ignored: failures were reported before."""
        if os.getpid() == self.process:
            with suppress(Exception):
                self.close(patient=True)


def open_lanes(
    world: TransportWorld,
    names: Iterable[LaneName],
    placement: Sequence[Sequence[int]],
    device: torch.device,
    transport: str | None = None,
) -> OpenLanes:
    """Open the lane ends of this rank. Every rank has to call, with the names of all lanes.

    `placement`: the ranks of each stage's replicas. `transport`: "shared", "gloo" or a registered name to override the
    choice by location; by default the environment's PENSTOCK_TRANSPORT.
    """
    ends: Ends = {
        name: (placement[name.source][name.source_replica], placement[name.target][name.target_replica])
        for name in sorted(set(names))
    }
    facts = exchange(world, ends, device, requested_transport(transport))
    kinds = {name: kind(facts[a], facts[b]) if a != b else "local" for name, (a, b) in ends.items()}
    mesh = _mesh(world) if set(kinds.values()) - {"local"} else None
    build = _Build(world, ends, kinds, {}, {})
    build.local()
    if mesh is not None:
        build.shared(mesh)
        build.nccl(mesh, device)
        build.gloo(mesh)
        build.registered()
    own_kinds = {name: kinds[name] for name, pair in ends.items() if world.rank in pair}
    lanes = OpenLanes(build.senders, build.receivers, kinds=own_kinds, mesh=mesh)
    atexit.register(lanes.leave)
    return lanes


def _mesh(world: TransportWorld) -> GlooMesh:
    """Connect all ranks over gloo. Where all lanes are shared, the mesh is only a fallback."""
    return run_interruptible(
        lambda: GlooMesh(world.watch, CONNECT), lambda waited: world.watch.check(EVERYBODY, waited)
    )


@dataclass(frozen=True)
class _Build:
    """Builder of the ends of all lanes, one transport after the other."""

    world: TransportWorld
    ends: Ends
    kinds: dict[LaneName, str]  # the transports; `shared` corrects them where there is no shared memory
    senders: dict[LaneName, Sender]
    receivers: dict[LaneName, Receiver]

    def sending(self, kind: str) -> dict[LaneName, int]:
        """Return the lanes of a kind on which this rank sends, and the ranks of their targets."""
        return {name: b for name, (a, b) in self.ends.items() if a == self.world.rank and self.kinds[name] == kind}

    def receiving(self, kind: str) -> dict[LaneName, int]:
        """Return the lanes of a kind on which this rank receives, and the ranks of their sources."""
        return {name: a for name, (a, b) in self.ends.items() if b == self.world.rank and self.kinds[name] == kind}

    def local(self) -> None:
        for name in self.sending("local"):
            self.senders[name] = self.receivers[name] = LocalLane(name)

    def shared(self, mesh: GlooMesh) -> None:
        """Open the shared lanes. If one end has no shared memory, the lane uses gloo alone."""
        if "shared" not in self.kinds.values():
            return
        world, watch = self.world, self.world.watch
        store = PrefixStore(f"lanes/{next(_opened)}", world.store)
        senders: dict[LaneName, SharedSender] = {}
        receivers: dict[LaneName, SharedReceiver] = {}
        errors: dict[LaneName, OSError] = {}
        for name, peer in self.sending("shared").items():
            try:
                senders[name] = SharedSender(name, store, watch, peer)
            except OSError as error:
                errors[name] = error
        self._announce_unshared(errors)
        for name, peer in self.receiving("shared").items():
            receivers[name] = SharedReceiver(name, store, watch, peer)
            try:
                receivers[name].connect()
            except OSError as error:
                errors[name] = error
        self._announce_unshared(errors)
        if errors:
            warn_slow(next(iter(errors.values())), "between the ranks of this host")
        for name, peer in self.sending("shared").items():
            self.senders[name] = SharedOrGlooSender(senders.pop(name), mesh.sender(name, peer))
        for name, peer in self.receiving("shared").items():
            self.receivers[name] = SharedOrGlooReceiver(receivers.pop(name), mesh.receiver(name, peer))
        for end in (*senders.values(), *receivers.values()):
            end.close()

    def _announce_unshared(self, troubles: dict[LaneName, OSError]) -> None:
        """Tell all ranks which lanes cannot be shared; those use gloo alone."""
        for message in self.world.gather(json.dumps(list(troubles)).encode()):
            self.kinds.update({LaneName(*name): "gloo" for name in json.loads(message)})

    def nccl(self, mesh: GlooMesh, device: torch.device) -> None:
        pairs = [pair for name, pair in self.ends.items() if self.kinds[name] == "nccl"]
        if pairs:
            outs, ins = nccl.connect(pairs, self.world.rank, device, mesh)
            for name, peer in self.sending("nccl").items():
                self.senders[name] = nccl.NcclSender(name, outs[peer])
            for name, peer in self.receiving("nccl").items():
                self.receivers[name] = nccl.NcclReceiver(name, ins[peer])

    def gloo(self, mesh: GlooMesh) -> None:
        for name, peer in self.sending("gloo").items():
            self.senders[name] = mesh.sender(name, peer)
        for name, peer in self.receiving("gloo").items():
            self.receivers[name] = mesh.receiver(name, peer)
        for peer in {*self.receiving("gloo").values(), *self.receiving("nccl").values()}:
            mesh.listen(peer)

    def registered(self) -> None:
        """Open the lanes over registered transports."""
        for kind in sorted(set(self.kinds.values())):
            transport = registered_transport(kind)
            if transport is None:
                continue
            number = next(_opened)
            for name, peer in self.sending(kind).items():
                self.senders[name] = transport.sender(self._link(name, peer, number))
            for name, peer in self.receiving(kind).items():
                self.receivers[name] = transport.receiver(self._link(name, peer, number))

    def _link(self, name: LaneName, peer: int, number: int) -> Link:
        store = PrefixStore(f"lanes/{number}/{name.source}-{name.target}", self.world.store)
        return Link(name, peer, store, self.world.watch)
