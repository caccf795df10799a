"""The states of a branching graph: each set of layers that holds all that feeds its members.

Such a set (an ideal) is what has been computed when a cut is passed; its last layers are an antichain. On a chain the
ideals are the runs from the front. A stage is the difference of two ideals, one inside the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.profile import Profile, Sent
from penstock.core.schedule import BoolArray
from penstock.errors import InputError

MOST_STATES = 6000


@dataclass(frozen=True, eq=False)
class Ideals:
    """Ideals from the empty one to the whole graph, smaller ones first, and sums over the layers of each."""

    profile: Profile
    masks: list[int]  # bit l: layer l is in the set
    seconds: FloatArray
    parameters: FloatArray
    standing: FloatArray  # bytes that stay whatever is in flight: gradients, buffers and optimizer
    version: FloatArray  # bytes that each mini-batch in flight adds: a weight version and activations
    cut: FloatArray  # bytes that leave the set
    below: BoolArray  # [i, j]: i is a proper part of j

    @classmethod
    def of(cls, profile: Profile, chain: bool = False) -> Ideals:
        return cls.over(profile, prefixes(profile) if chain else _grow(profile, _core(profile)))

    @classmethod
    def over(cls, profile: Profile, masks: list[int]) -> Ideals:
        """Return the sums over given states."""
        member = _members(masks, len(profile.layers))
        layers = profile.layers

        def total(values: list[float]) -> FloatArray:
            sums: FloatArray = member @ np.array(values)
            return sums

        return cls(
            profile,
            masks,
            seconds=total([layer.seconds for layer in layers]),
            parameters=total([layer.parameter_bytes for layer in layers]),
            standing=total([x.parameter_bytes + x.buffer_bytes + x.optimizer_bytes for x in layers]),
            version=total([layer.parameter_bytes + layer.kept_bytes for layer in layers]),
            cut=_leaving(profile, member),
            below=_inclusion(member),
        )

    def __len__(self) -> int:
        return len(self.masks)

    def arrange(self, cuts: list[int]) -> tuple[Profile, list[int]]:
        """Return the profile in an order that makes every stage a run of layers, and where the stages begin and end.

        `cuts` are the states between the stages, the empty and the whole one included. Layers that are in no state
        cost nothing: data goes where it is first used, an unused output stays where it is made.
        """
        layers, edges = range(len(self.profile.layers)), self.profile.edges
        stage: dict[int, int] = {}
        for s, (a, b) in enumerate(pairwise(cuts)):
            inside = self.masks[b] & ~self.masks[a]
            stage.update({layer: s for layer in layers if inside >> layer & 1})
        counted = set(stage)
        for layer in sorted(_data(self.profile) - counted, reverse=True):
            stage[layer] = min((stage[b] for a, b in edges if a == layer and b in stage), default=0)
        for layer in set(layers) - set(stage):
            stage[layer] = max((stage[a] for a, b in edges if b == layer), default=0)
        order = sorted(layers, key=lambda layer: (stage[layer], layer))
        sizes = np.bincount([stage[layer] for layer in layers], minlength=len(cuts) - 1)
        return _reordered(self.profile, order), [0, *np.cumsum(sizes).tolist()]


def _free(profile: Profile, layer: int) -> bool:
    given = profile.layers[layer]
    kept = given.kept_bytes + given.parameter_bytes + given.buffer_bytes + given.optimizer_bytes
    return given.seconds == 0 and kept == 0


def _data(profile: Profile) -> set[int]:
    """Return the inputs: layers that cost nothing, send nothing, and read at most from other such layers."""
    feeders: dict[int, set[int]] = {}
    for a, b in profile.edges:
        feeders.setdefault(b, set()).add(a)
    data: set[int] = set()
    sending = {one.source for one in profile.outputs if one.bytes}
    for at in range(len(profile.layers)):
        if _free(profile, at) and at not in sending and feeders.get(at, set()) <= data:
            data.add(at)
    return data


def _core(profile: Profile) -> set[int]:
    """Return the layers that a cut can tell apart: all but data and outputs that cost nothing and nobody uses."""
    used = {a for a, _ in profile.edges}
    layers = set(range(len(profile.layers)))
    core = layers - _data(profile) - {x for x in layers if x not in used and _free(profile, x)}
    return core or layers


def _grow(profile: Profile, core: set[int]) -> list[int]:
    """Return every ideal of the core's graph, made by adding one layer at a time; smaller ones first."""
    needs, after = dict.fromkeys(core, 0), {x: set[int]() for x in core}
    for a, b in profile.edges:
        if a in core and b in core:
            needs[b] |= 1 << a
            after[a].add(b)
    ideals: list[int] = [0]
    level = {0: {x for x in core if not needs[x]}}  # sets of one size, and the layers that each can grow by
    for size in range(1, len(core) + 1):
        grown: dict[int, set[int]] = {}
        for mask, ready in level.items():
            for x in ready:
                more = mask | 1 << x
                if more not in grown:
                    grown[more] = ready - {x} | {y for y in after[x] if needs[y] & ~more == 0}
        ideals += sorted(grown)
        level = grown
        if len(ideals) > MOST_STATES:
            raise InputError(
                f"a graph with at most {MOST_STATES} states (sets of layers that a cut can follow)",
                f"more, within its first {size} layers",
                "join the layers of parallel branches, or pass graph='chain' to cut along the profile's order only",
            )
    return ideals


def prefixes(profile: Profile) -> list[int]:
    """Return the states of a graph that is cut along the profile's order only."""
    return [(1 << count) - 1 for count in range(len(profile.layers) + 1)]


def _members(masks: list[int], layers: int) -> FloatArray:
    """[state, layer]: 1 where the layer is in the state."""
    width = (layers + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little")
    return bits[:, :layers].astype(np.float64)


def _leaving(profile: Profile, member: FloatArray) -> FloatArray:
    """Return the bytes of outputs that some layer outside the state uses; a layer in no state is with its sources."""
    leaving, counted = np.zeros(len(member)), member[-1] > 0
    for one in profile.outputs:
        readers = [reader for reader in one.readers if counted[reader]]
        leaving += one.bytes * ((member[:, one.source] > 0) & (member[:, readers] == 0).any(axis=1))
    return leaving


def _inclusion(member: FloatArray) -> BoolArray:
    """[i, j]: state i is a proper part of state j; states that small are compared all with all."""
    sizes = member.sum(axis=1)
    common = member.astype(np.float32) @ member.astype(np.float32).T
    below: BoolArray = (common == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
    return below


def _reordered(profile: Profile, order: list[int]) -> Profile:
    if order == list(range(len(order))):
        return profile
    place = {layer: at for at, layer in enumerate(order)}
    edges = tuple(sorted((place[a], place[b]) for a, b in profile.edges))
    sent = tuple(Sent(place[one.source], tuple(place[b] for b in one.readers), one.bytes) for one in profile.sent)
    return replace(profile, layers=tuple(profile.layers[layer] for layer in order), edges=edges, sent=sent)
