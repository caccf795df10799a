"""The states that PipeDream's published solver walks through, as sets of layers, to time its recursion on.

Inputs and unused `__getitem__` outputs are taken out. The walk begins with the first source alone; from a set it goes
to that set with one layer more that something in the set feeds, and with all that this layer needs. A source that is
not the first enters only when it is needed, so some sets that a cut could follow are never met; on the other hand a
source that is no "Input" by name, though it costs nothing and sends nothing, makes states. In gnmt_large that is the
node `hidden`: the outputs it is taken apart into come in any order, which makes 1,495 states of what are 100 cuts.
"""

from __future__ import annotations


def published_states(profile):
    """Bit masks of layers, smaller sets first, the empty one before them."""
    layers, needs = _pruned(profile)
    feeds = {at: [b for b in needs if at in needs[b]] for at in layers}
    below = {at: _closure(at, needs) for at in sorted(layers)}
    start = below[next(at for at in sorted(layers) if not needs[at])]
    found, waiting = {start}, [start]
    while waiting:
        mask = waiting.pop()
        for at in layers:
            for later in feeds[at] if mask >> at & 1 else ():
                grown = mask | below[later]
                if grown not in found:
                    found.add(grown)
                    waiting.append(grown)
    return [0, *sorted(found, key=lambda mask: (mask.bit_count(), mask))]


def _pruned(profile):
    """The layers that are left, and what each needs of them."""
    fed, feeding = {b for _, b in profile.edges}, {a for a, _ in profile.edges}

    def kept(at):
        name = profile.layers[at].name.split(" ", 1)[-1]
        is_input = at not in fed and name.startswith("Input")
        return not is_input and (at in feeding or not name.startswith("__getitem__"))

    layers = [at for at in range(len(profile.layers)) if kept(at)]
    return layers, {b: {a for a, c in profile.edges if c == b and a in set(layers)} for b in layers}


def _closure(layer, needs):
    """A layer and all that it needs."""
    mask, waiting = 0, [layer]
    while waiting:
        at = waiting.pop()
        if not mask >> at & 1:
            mask |= 1 << at
            waiting += needs[at]
    return mask
