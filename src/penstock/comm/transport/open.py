"""Open the lanes of a rank, each over the transport that suits where its two ends are.

    both stages on one rank         local
    what the user asks for          that: shared, gloo, or a transport of his own (registered.py)
    a GPU each, and NCCL            nccl
    one host                        shared memory, with gloo in reserve
    else                            gloo

Before that, ranks exchange the facts that decide it: host, device, and what each can open.
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
from penstock.comm.transport.local import Local
from penstock.comm.transport.registered import Link, registered_transport, transport_names
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.sender import SharedSender
from penstock.comm.world.rendezvous import patiently
from penstock.errors import InputError

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
    shared = mapping.can_share_memory() and mapping.has_semaphores()
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
    names = transport_names()
    if wish is not None and wish not in names:
        source = "transport=" if transport else VARIABLE
        raise InputError(f"{source} to be one of {', '.join(names)}", repr(wish), "correct it or leave it out")
    return wish


def _gpu(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


EVERYBODY = -1
CONNECT = 60.0  # seconds for all ranks to connect

Ends = dict[LaneName, tuple[int, int]]  # the ranks of a lane's source and target

_opened = itertools.count()  # the same on every rank: lanes are opened by all together


@dataclass
class OpenLanes(Lanes):
    """`kinds`: the transport of each lane of this rank."""

    kinds: dict[LaneName, str] = field(default_factory=dict)
    mesh: GlooMesh | None = None
    process: int = field(default_factory=os.getpid)

    def close(self, patient: bool = False) -> None:
        """By all ranks: everything sent still arrives. Patient: whenever the others come to it."""
        atexit.unregister(self.leave)
        with ExitStack() as last_to_first:
            if self.mesh is not None:
                last_to_first.callback(self.mesh.close, patient)
            for receiver in self.receivers.values():
                last_to_first.callback(receiver.close)
            for sender in self.senders.values():
                last_to_first.callback(sender.close)

    def leave(self) -> None:
        """At the end of the process. A failure has been told before; a rank that ends early is found by the rest."""
        if os.getpid() == self.process:
            with suppress(Exception):
                self.close(patient=True)


def open_lanes(
    world: World,
    names: Iterable[LaneName],
    placement: Sequence[int],
    device: torch.device,
    transport: str | None = None,
) -> OpenLanes:
    """The ends that this rank holds. Every rank has to call, with the same names: those of all lanes there are.

    `placement`: the rank of each stage. `transport`: "shared", "gloo" or a registered name instead of what would be
    chosen; the environment's PENSTOCK_TRANSPORT where it is not given.
    """
    ends: Ends = {name: (placement[name.source], placement[name.target]) for name in sorted(set(names))}
    facts = exchange(world, ends, device, wish_of(transport))
    kinds = {name: kind(facts[a], facts[b]) if a != b else "local" for name, (a, b) in ends.items()}
    mesh = _mesh(world) if set(kinds.values()) - {"local"} else None
    build = _Build(world, ends, kinds, {}, {})
    build.local()
    if mesh is not None:
        build.shared(mesh)
        build.nccl(mesh, device)
        build.gloo(mesh)
        build.registered()
    mine = {name: kinds[name] for name, pair in ends.items() if world.rank in pair}
    lanes = OpenLanes(build.senders, build.receivers, kinds=mine, mesh=mesh)
    atexit.register(lanes.leave)
    return lanes


def _mesh(world: World) -> GlooMesh:
    """Where all lanes are shared it carries nothing, until there is no memory for a message."""
    return patiently(lambda: GlooMesh(world.watch, CONNECT), lambda waited: world.watch.check(EVERYBODY, waited))


@dataclass(frozen=True)
class _Build:
    """Makes the ends of all lanes, kind by kind."""

    world: World
    ends: Ends
    kinds: dict[LaneName, str]  # `shared` corrects it where there is no shared memory
    senders: dict[LaneName, Sender]
    receivers: dict[LaneName, Receiver]

    def sending(self, kind: str) -> dict[LaneName, int]:
        """The lanes of a kind that this rank sends on, and their targets' ranks."""
        return {name: b for name, (a, b) in self.ends.items() if a == self.world.rank and self.kinds[name] == kind}

    def receiving(self, kind: str) -> dict[LaneName, int]:
        return {name: a for name, (a, b) in self.ends.items() if b == self.world.rank and self.kinds[name] == kind}

    def local(self) -> None:
        for name in self.sending("local"):
            self.senders[name] = self.receivers[name] = Local(name)

    def shared(self, mesh: GlooMesh) -> None:
        """Both ends must have the memory; where one has not, the lane is gloo's."""
        if "shared" not in self.kinds.values():
            return
        world, watch = self.world, self.world.watch
        store = PrefixStore(f"lanes/{next(_opened)}", world.store)
        senders: dict[LaneName, SharedSender] = {}
        receivers: dict[LaneName, SharedReceiver] = {}
        troubles: dict[LaneName, OSError] = {}
        for name, peer in self.sending("shared").items():
            try:
                senders[name] = SharedSender(name, store, watch, peer)
            except OSError as error:
                troubles[name] = error
        self._give_up(troubles)
        for name, peer in self.receiving("shared").items():
            receivers[name] = SharedReceiver(name, store, watch, peer)
            try:
                receivers[name].connect()
            except OSError as error:
                troubles[name] = error
        self._give_up(troubles)
        if troubles:
            warn_slow(next(iter(troubles.values())), "between the ranks of this host")
        for name, peer in self.sending("shared").items():
            self.senders[name] = SharedOrGlooSender(senders.pop(name), mesh.sender(name, peer))
        for name, peer in self.receiving("shared").items():
            self.receivers[name] = SharedOrGlooReceiver(receivers.pop(name), mesh.receiver(name, peer))
        for end in (*senders.values(), *receivers.values()):
            end.close()

    def _give_up(self, troubles: dict[LaneName, OSError]) -> None:
        """All ranks learn of all lanes that cannot be shared."""
        for said in self.world.gather(json.dumps(list(troubles)).encode()):
            self.kinds.update({LaneName(*name): "gloo" for name in json.loads(said)})

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
        """Make the ends of lanes whose transport is the user's own."""
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
