"""The processes of a pipeline: which stages each runs, and checks that they were started alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.comm.transport.interface import Message
from penstock.comm.transport.wire import from_bytes, to_bytes
from penstock.comm.world.rejoin import begin_pipeline
from penstock.comm.world.world import Alone, World, join
from penstock.core.shape import Shape
from penstock.errors import InputError
from penstock.model import tree
from penstock.model.naming import leaf_places


@dataclass(frozen=True)
class Ranks:
    """The processes of one pipeline, as one of them sees them."""

    world: World | Alone
    members: tuple[tuple[int, ...], ...]  # the process of every replica of every stage; all 0 where one runs them all

    @property
    def placement(self) -> tuple[int, ...]:
        """The process of every stage's first replica."""
        return tuple(group[0] for group in self.members)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of every stage."""
        return tuple(len(group) for group in self.members)

    def of_slots(self, shape: Shape) -> list[int]:
        """Return the process of every slot."""
        places = zip(shape.slot_rank.tolist(), shape.slot_replica.tolist(), strict=True)
        return [self.members[shape.stages_of(rank)[0]][replica] for rank, replica in places]

    @property
    def here(self) -> tuple[int, ...]:
        """The stages that this process runs."""
        return tuple(stage for stage, group in enumerate(self.members) if self.world.rank in group)

    @property
    def replica(self) -> int:
        """Which replica of its stages this process runs; 0 where it runs them all."""
        return 0 if self.alone else self.members[self.here[0]].index(self.world.rank)

    @property
    def replicated(self) -> bool:
        """Whether any stage has several replicas."""
        return max(self.replicas) > 1

    @property
    def last(self) -> int:
        """Rank that has the model's results."""
        return self.placement[-1]

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    def broadcast(self, value: Any, source: int | None = None) -> Any:
        """Return a JSON value of one rank, by default the last stage's, on every rank."""
        source = self.last if source is None else source
        encoded = json.dumps(value).encode() if self.world.rank == source else None
        return json.loads(self.world.broadcast(encoded, source))

    def broadcast_result(self, result: Any, example: Any, device: torch.device) -> Any:
        """Return the model's result, which the last stage's rank has, on every rank. `example` has its structure."""
        if self.alone:
            return result
        if self.world.rank == self.last:
            self.world.broadcast(_leaves(result), self.last)
            return result
        message = from_bytes(self.world.broadcast(None, self.last))
        words = json.loads(message.metadata)
        places = iter(leaf_places(example))

        def leaf(_: Any) -> Any:
            word = words[next(places)]
            return message.values[word["at"]].to(device) if isinstance(word, dict) else word

        return tree.replace_leaves(example, leaf)


def _leaves(result: Any) -> bytes:
    """Encode a result by the places of its tensors and plain values, whose order may differ between ranks."""
    tensors: dict[int, torch.Tensor] = {}
    words: dict[str, Any] = {}
    for place, leaf in zip(leaf_places(result), tree.leaves(result), strict=True):
        if isinstance(leaf, torch.Tensor):
            words[place] = {"at": len(tensors)}
            tensors[len(tensors)] = leaf
        else:
            words[place] = leaf if isinstance(leaf, (type(None), bool, int, float, str)) else None
    return to_bytes(Message(tensors, json.dumps(words).encode()))


def join_ranks(shape: Shape, timeout: float, order: Sequence[int] = ()) -> Ranks:
    """The processes that were launched together, one for every slot; or this one for all.

    `order`: the process of every slot, where a plan has placed them; else process r runs slot r.
    """
    world = join()
    if world is None or world.size == 1:
        return Ranks(Alone(), tuple((0,) * count for count in shape.stage_replicas.tolist()))
    world.watch.timeout = timeout
    begin_pipeline(world)
    if world.size != shape.slots:
        raise _wrong_size(shape, world.size)
    process = tuple(order) or tuple(range(shape.slots))
    first = [shape.slot(stage) for stage in range(shape.stages)]
    members = tuple(process[at : at + count] for at, count in zip(first, shape.stage_replicas.tolist(), strict=True))
    ranks = Ranks(world, members)
    several = ranks.replicas[ranks.here[0]] > 1
    world.watch.status_page.name_stages(ranks.here, ranks.replica if several else None)
    return ranks


def _wrong_size(shape: Shape, processes: int) -> InputError:
    launch = f"launch with --nproc-per-node {shape.slots} (over all hosts together)"
    if shape.slots == shape.ranks:
        expected = f"{shape.ranks} processes for a pipeline of {shape.ranks} ranks"
        return InputError(expected, processes, f"{launch}, or use stages={processes}")
    counts = ":".join(map(str, shape.replicas))
    expected = f"{shape.slots} processes for {shape.ranks} pipeline ranks with {counts} replicas"
    return InputError(expected, processes, f"{launch}, or give other replicas")


def require_agreement(ranks: Ranks, settings: dict[str, Any]) -> None:
    """Refuse ranks that were told different things, each named with its value on the first two that differ."""
    every = [json.loads(part) for part in ranks.world.gather(json.dumps(settings).encode())]
    for name in settings:
        for rank, theirs in enumerate(every):
            if theirs.get(name) != every[0].get(name):
                raise InputError(
                    f"the same {name} on every rank",
                    f"{every[0].get(name)} on rank 0 and {theirs.get(name)} on rank {rank}",
                    "run the same script with the same arguments on every rank",
                )


def require_same_model(ranks: Ranks, model: nn.Module) -> None:
    """Raise for ranks whose models differ: in their weights' names and shapes, or in the layers under the same names.

    A model that makes its layers in the order of a set may differ so.
    """
    parts = [(name, tuple(t.shape), str(t.dtype)) for name, t in _by_name(model)]
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = f"{type(model).__name__} of {count} parameters ({zlib.crc32(repr(parts).encode()):08x})"
    layers = {name: _layer(module) for name, module in model.named_modules()}
    digest = f"{zlib.crc32(repr(sorted(layers.items())).encode()):08x}"
    if len(set(ranks.world.gather(digest.encode()))) > 1:
        require_agreement(ranks, {"model": weights})
        every = [json.loads(part) for part in ranks.world.gather(json.dumps(layers).encode())]
        names = {name for theirs in every for name in theirs}
        odd = next(name for name in sorted(names) if len({theirs.get(name) for theirs in every}) > 1)
        require_agreement(ranks, {f"layer {odd!r}": layers.get(odd, "none")})
    require_agreement(ranks, {"model": weights})


def _layer(module: nn.Module) -> str:
    """Return the class of a layer, with its settings if it is one of torch's own."""
    kind = type(module)
    torchs = kind.__module__.startswith("torch.nn.")
    return f"{kind.__name__}({module.extra_repr()})" if torchs else kind.__qualname__


def _name(named: tuple[str, torch.Tensor]) -> str:
    return named[0]


def _by_name(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers sorted by name: a model may register them in a different order on each rank."""
    return [*sorted(model.named_parameters(), key=_name), *sorted(model.named_buffers(), key=_name)]


def same_weights(ranks: Ranks, model: nn.Module) -> None:
    """Copy rank 0's weights and buffers to ranks that built their models from other seeds."""
    tensors = [t.detach() for _, t in _by_name(model) if not t.is_meta]
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(raw(tensor), checksum)
    if len(set(ranks.world.gather(checksum.to_bytes(4, "little")))) == 1:
        return
    for tensor in tensors:
        share(ranks, tensor, 0)


def share(ranks: Ranks, tensor: torch.Tensor, source: int) -> None:
    """Copy a tensor's values from another rank."""
    data = ranks.world.broadcast(bytes(raw(tensor)) if ranks.world.rank == source else None, source)
    if ranks.world.rank != source and data:
        with torch.no_grad():
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def raw(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, row by row."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
