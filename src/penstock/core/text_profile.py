"""Read the text profiles of the literature, with one line per node and one per edge, into a Profile.

    node4 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=[8; 4.0],
    parameter_size=36
        node4 -- node5

Times are milliseconds, sizes bytes; a list of sizes counts as its sum; ` -- stage_id=K` at the end of a node's line is
ignored. A node without predecessors whose name begins with "input" is data and costs nothing. The format has a single
backward time, all of which becomes the input gradient's, since the two gradients were not measured apart. A layer is
assumed to keep as many bytes for its backward as it outputs, as the planners published with the format assume; a node
whose forward takes no time is a view of another output and keeps nothing.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.profile import Layer, Profile
from penstock.core.validation import LARGEST
from penstock.errors import FormatError

FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
NODE_LINE = "`nodeN -- NAME -- " + "=..., ".join(FIGURES) + "=...`"
NUMBER = re.compile(r"node(\d+)")


@dataclass
class _TextGraph:
    """The content of a file, by the names of the nodes, with the line number of each for error messages."""

    where: str
    lines: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    edges: dict[tuple[str, str], int] = field(default_factory=dict)

    def fault(self, line: int, expected: str, came: object, do: str) -> FormatError:
        return FormatError(f"{self.where}:{line}", expected, came, do)


def read_text_profile(path: str | Path, samples: int = 1) -> Profile:
    """Return the profile in a text file; `samples` is the measured batch size, which the format lacks."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(str(path), "a readable text profile", error.strerror, "check the path") from None
    except UnicodeDecodeError:
        raise FormatError(str(path), "a text profile in UTF-8", "another encoding", "save it as UTF-8") from None
    return from_text_profile(text, str(path), samples)


def from_text_profile(text: str, where: str = "text profile", samples: int = 1) -> Profile:
    """Return the profile in a text; error messages name `where` and the line."""
    graph = _TextGraph(where)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            _read_line(graph, number, line)
    if not graph.names:
        raise FormatError(where, "a graph with at least one node", "none", f"write nodes as {NODE_LINE}")
    for ends, number in graph.edges.items():
        for end in ends:
            if end not in graph.names:
                raise graph.fault(number, "an edge between nodes of this file", end, "add the node or drop the edge")
    order = _ordered(graph)
    fed = {b for _, b in graph.edges}
    place = {node: at for at, node in enumerate(order)}
    layers = tuple(_layer(graph, node, node in fed) for node in order)
    edges = tuple(sorted((place[a], place[b]) for a, b in graph.edges))
    return Profile(layers, edges, samples, where)


def _read_line(graph: _TextGraph, number: int, line: str) -> None:
    """Read one line: an edge if it begins with white space, else a node."""
    parts = [part.strip() for part in line.strip().split(" -- ")]
    if line[0].isspace():
        if len(parts) != 2 or not all(NUMBER.fullmatch(part) for part in parts):
            raise graph.fault(number, "an edge, a tab and `nodeA -- nodeB`", line.strip(), "correct the line")
        graph.edges.setdefault((parts[0], parts[1]), number)
        return
    if len(parts) > 3 and re.fullmatch(r"stage_id=\d+", parts[-1]):
        parts.pop()
    if len(parts) < 3 or not NUMBER.fullmatch(parts[0]):
        raise graph.fault(number, f"a node, {NODE_LINE}, or an edge after a tab", line.strip(), "correct the line")
    node = parts[0]
    if node in graph.names:
        raise graph.fault(number, "each node once", f"{node} again", f"see line {graph.lines[node]}")
    graph.lines[node], graph.names[node] = number, " -- ".join(parts[1:-1])
    graph.figures[node] = _figures(graph, number, parts[-1])


def _figures(graph: _TextGraph, number: int, text: str) -> dict[str, float]:
    """Return the four numbers of a node."""
    texts: dict[str, str] = {}
    for part in text.split(", "):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in FIGURES:
            raise graph.fault(number, f"the keys {', '.join(FIGURES)}", repr(key), "correct the line")
        if key in texts:
            raise graph.fault(number, "each key once", f"{key} again", "drop one of them")
        texts[key] = value
    for key in FIGURES:
        if not texts.get(key):
            raise graph.fault(number, f"a number for {key}", "none", "complete the line")
    return {key: _number(graph, number, key, texts[key]) for key in FIGURES}


def _number(graph: _TextGraph, number: int, key: str, text: str) -> float:
    """Return a number of 0 or more, or the sum of a list `[a; b]` of sizes."""
    listed = key == "activation_size" and text.startswith("[") and text.endswith("]")
    try:
        values = [float(part) for part in (text[1:-1].split(";") if listed else [text])]
    except ValueError:
        raise graph.fault(number, f"{key} to be a number", repr(text), "correct the line") from None
    if not all(value >= 0 for value in values):
        raise graph.fault(number, f"{key} to be 0 or more", text, "correct the line")
    if sum(values) > LARGEST:
        raise graph.fault(number, f"{key} to be at most {LARGEST:g}", text, "correct the line")
    return sum(values)


def _ordered(graph: _TextGraph) -> list[str]:
    """Return the nodes in topological order, with the lowest numbers first where there is a choice."""
    waits = dict.fromkeys(graph.names, 0)
    after: dict[str, list[str]] = {node: [] for node in graph.names}
    for a, b in graph.edges:
        waits[b] += 1
        after[a].append(b)
    ready = [(int(node[4:]), node) for node, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, (int(later[4:]), later))
    if len(order) < len(graph.names):
        cycle = _cycle(graph, set(graph.names) - set(order))
        line = graph.edges[cycle[-2], cycle[-1]]
        raise graph.fault(line, "a graph without cycles", " -> ".join(cycle), "drop an edge of the cycle")
    return order


def _cycle(graph: _TextGraph, stuck: set[str]) -> list[str]:
    """Return one cycle among the nodes that have no order: follow predecessors until one repeats."""
    feeds = {b: a for a, b in graph.edges if a in stuck and b in stuck}
    path = [min(stuck, key=lambda node: (node not in feeds, int(node[4:])))]
    while path.count(path[-1]) == 1:
        path.append(feeds[path[-1]])
    return path[path.index(path[-1]) :][::-1]


def _layer(graph: _TextGraph, node: str, fed: bool) -> Layer:
    name, figures = f"{node} {graph.names[node]}", graph.figures[node]
    if not fed and graph.names[node].lower().startswith("input"):
        return Layer(name, 0.0, 0.0, 0.0)
    forward, backward, activation, parameters = (figures[key] for key in FIGURES)
    return Layer(
        name,
        forward / 1000,
        backward / 1000,
        0.0,
        output_bytes=activation,
        kept_bytes=activation if forward else 0.0,
        parameter_bytes=parameters,
    )
