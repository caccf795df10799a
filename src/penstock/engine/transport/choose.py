"""The lanes of a rank, each over the transport that suits where its two ends are.

both stages on one rank         local
a GPU each, and NCCL            nccl
one host                        shared memory, with gloo in reserve
else                            gloo
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import PrefixStore

from penstock.engine.lanes import Lanes
from penstock.engine.meeting import patiently
from penstock.engine.transport import nccl
from penstock.engine.transport.facts import World, exchange, kind, wish_of
from penstock.engine.transport.fallback import SharedOrGlooReceiver, SharedOrGlooSender, warn_slow
from penstock.engine.transport.gloo import GlooMesh
from penstock.engine.transport.lane import LaneName, Receiver, Sender
from penstock.engine.transport.local import Local
from penstock.engine.transport.shared_receiver import SharedReceiver
from penstock.engine.transport.shared_sender import SharedSender

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

    `placement`: the rank of each stage. `transport`: "shared" or "gloo" instead of what would be chosen; the
    environment's PENSTOCK_TRANSPORT where it is not given.
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
