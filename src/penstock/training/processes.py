"""Which process runs which stages, and what the processes must agree on before they start."""

from __future__ import annotations

import json
import zlib
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
class Crew:
    """The processes of one pipeline, seen from one of them."""

    world: World | Alone
    placement: tuple[int, ...]  # the rank of every stage's first replica; all 0 where one process runs them all
    replicas: tuple[int, ...]  # of every stage

    @property
    def here(self) -> tuple[int, ...]:
        """The stages that this process runs."""
        if self.alone:
            return tuple(range(len(self.placement)))
        rank = self.world.rank
        return tuple(at for at, first in enumerate(self.placement) if first <= rank < first + self.replicas[at])

    @property
    def replica(self) -> int:
        """Which replica of its stages this process runs; 0 where it runs them all."""
        return 0 if self.alone else self.world.rank - self.placement[self.here[0]]

    @property
    def replicated(self) -> bool:
        """Whether any stage has several replicas."""
        return max(self.replicas) > 1

    @property
    def last(self) -> int:
        """The rank that has the model's results."""
        return self.placement[-1]

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    def tell(self, found: Any) -> Any:
        """A few plain values that the last stage's rank knows, to every rank."""
        return self.told(found, self.last)

    def told(self, found: Any, rank: int) -> Any:
        """A few plain values that one rank knows, to every rank."""
        mine = json.dumps(found).encode() if self.world.rank == rank else None
        return json.loads(self.world.broadcast(mine, rank))

    def result(self, found: Any, example: Any, device: torch.device) -> Any:
        """A result of the model's, which the last stage's rank has, on every rank. `example` has its structure."""
        if self.alone:
            return found
        if self.world.rank == self.last:
            self.world.broadcast(_leaves(found), self.last)
            return found
        message = from_bytes(self.world.broadcast(None, self.last))
        words = json.loads(message.told)
        places = iter(leaf_places(example))

        def leaf(_: Any) -> Any:
            word = words[next(places)]
            return message.values[word["at"]].to(device) if isinstance(word, dict) else word

        return tree.replace_leaves(example, leaf)


def _leaves(result: Any) -> bytes:
    """Tensors and plain values of a result, by their places in it, whose order may be another on another rank."""
    tensors: dict[int, torch.Tensor] = {}
    words: dict[str, Any] = {}
    for place, leaf in zip(leaf_places(result), tree.leaves(result), strict=True):
        if isinstance(leaf, torch.Tensor):
            words[place] = {"at": len(tensors)}
            tensors[len(tensors)] = leaf
        else:
            words[place] = leaf if isinstance(leaf, (type(None), bool, int, float, str)) else None
    return to_bytes(Message(tensors, json.dumps(words).encode()))


def muster(shape: Shape, timeout: float) -> Crew:
    """The processes that were launched together, one a pipeline rank; or this one for all."""
    world, replicas = join(), tuple(shape.stage_replicas.tolist())
    if world is None or world.size == 1:
        return Crew(Alone(), (0,) * shape.stages, replicas)
    world.watch.timeout = timeout
    begin_pipeline(world)
    if world.size != shape.slots:
        raise _wrong_size(shape, world.size)
    found = Crew(world, tuple(shape.slot(stage) for stage in range(shape.stages)), replicas)
    several = found.replicas[found.here[0]] > 1
    world.watch.board.name_stages(found.here, found.replica if several else None)
    return found


def _wrong_size(shape: Shape, processes: int) -> InputError:
    launch = f"launch with --nproc-per-node {shape.slots} (over all hosts together)"
    if shape.slots == shape.ranks:
        expected = f"{shape.ranks} processes for a pipeline of {shape.ranks} ranks"
        return InputError(expected, processes, f"{launch}, or use stages={processes}")
    counts = ":".join(map(str, shape.replicas))
    expected = f"{shape.slots} processes for {shape.ranks} pipeline ranks with {counts} replicas"
    return InputError(expected, processes, f"{launch}, or give other replicas")


def require_agreement(crew: Crew, settings: dict[str, Any]) -> None:
    """Refuse ranks that were told different things, each named with its value on the first two that differ."""
    every = [json.loads(part) for part in crew.world.gather(json.dumps(settings).encode())]
    for name in settings:
        for rank, theirs in enumerate(every):
            if theirs.get(name) != every[0].get(name):
                raise InputError(
                    f"the same {name} on every rank",
                    f"{every[0].get(name)} on rank 0 and {theirs.get(name)} on rank {rank}",
                    "run the same script with the same arguments on every rank",
                )


def require_same_model(crew: Crew, model: nn.Module) -> None:
    """Refuse ranks whose models are not made alike: of other weights, or of other layers under the same names, as one
    that makes its layers in the order of a set may be."""
    parts = [(name, tuple(t.shape), str(t.dtype)) for name, t in _by_name(model)]
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = f"{type(model).__name__} of {count} parameters ({zlib.crc32(repr(parts).encode()):08x})"
    layers = {name: _layer(module) for name, module in model.named_modules()}
    digest = f"{zlib.crc32(repr(sorted(layers.items())).encode()):08x}"
    if len(set(crew.world.gather(digest.encode()))) > 1:
        require_agreement(crew, {"model": weights})
        every = [json.loads(part) for part in crew.world.gather(json.dumps(layers).encode())]
        names = {name for theirs in every for name in theirs}
        odd = next(name for name in sorted(names) if len({theirs.get(name) for theirs in every}) > 1)
        require_agreement(crew, {f"layer {odd!r}": layers.get(odd, "none")})
    require_agreement(crew, {"model": weights})


def _layer(module: nn.Module) -> str:
    """The class of a layer; and its settings, of one of torch's own, which are plain values."""
    kind = type(module)
    torchs = kind.__module__.startswith("torch.nn.")
    return f"{kind.__name__}({module.extra_repr()})" if torchs else kind.__qualname__


def _name(named: tuple[str, torch.Tensor]) -> str:
    return named[0]


def _by_name(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers in an order that all ranks have: a model may register them in that of a set."""
    return [*sorted(model.named_parameters(), key=_name), *sorted(model.named_buffers(), key=_name)]


def same_weights(crew: Crew, model: nn.Module) -> None:
    """Ranks that built their models from different seeds all get rank 0's weights and buffers."""
    tensors = [t.detach() for _, t in _by_name(model) if not t.is_meta]
    mine = 0
    for tensor in tensors:
        mine = zlib.crc32(raw(tensor), mine)
    if len(set(crew.world.gather(mine.to_bytes(4, "little")))) == 1:
        return
    for tensor in tensors:
        share(crew, tensor, 0)


def share(crew: Crew, tensor: torch.Tensor, source: int) -> None:
    """Fill a tensor with what it holds on another rank."""
    data = crew.world.broadcast(bytes(raw(tensor)) if crew.world.rank == source else None, source)
    if crew.world.rank != source and data:
        with torch.no_grad():
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row by row."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
