"""Text profiles: what is read, and one message, with file and line, for each way to get them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import FormatError
from penstock.core.text_profile import from_text_profile, read_text_profile

FIGURES = "forward_compute_time=1.5, backward_compute_time=3.0, activation_size=8.0, parameter_size=2"
SHARED = Path(__file__).parents[3] / "shared" / "profiles"


def node(number, name="Linear(4, 4)", figures=FIGURES, end=""):
    return f"node{number} -- {name} -- {figures}{end}\n"


def test_nodes_lists_stage_numbers_and_edges():
    text = (
        node(3, figures=FIGURES.replace("8.0", "[8.0; 4; 0.5]"), end=" -- stage_id=7")
        + node(1, "Input0")
        + node(2, "odd -- name")
        + "\tnode1 -- node2\n\tnode2 -- node3\n\n"
    )
    profile = from_text_profile(text, samples=64)
    data, first, second = profile.layers
    assert (data.seconds, data.output_bytes, data.name) == (0, 0, "node1 Input0")
    assert (first.name, first.forward, first.input_grad) == ("node2 odd -- name", 0.0015, 0.003)
    assert (second.output_bytes, second.kept_bytes, second.parameter_bytes) == (12.5, 12.5, 2)
    assert (profile.edges, profile.samples) == (((0, 1), (1, 2)), 64)


def test_branches_keep_their_edges():
    text = (
        "".join(node(n) for n in (5, 4, 2, 1))
        + "\tnode1 -- node4\n\tnode1 -- node2\n\tnode2 -- node5\n\tnode4 -- node5\n"
    )
    assert from_text_profile(text).edges == ((0, 1), (0, 2), (1, 3), (2, 3))


FOUR = "".join(node(n) for n in (1, 2, 3, 4))
BAD = {
    "empty": ("", "f.txt: expected a graph with at least one node, but got none"),
    "cycle": (
        FOUR + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node2\n\tnode3 -- node4\n",
        "f.txt:7: expected a graph without cycles, but got node2 -> node3 -> node2",
    ),
    "self": (node(1) + "\tnode1 -- node1\n", "f.txt:2: expected a graph without cycles, but got node1 -> node1"),
    "negative": (
        node(1) + node(2, figures=FIGURES.replace("3.0", "-3.0")),
        "f.txt:2: expected backward_compute_time to be 0 or more, but got -3.0",
    ),
    "nan": (node(1, figures=FIGURES.replace("3.0", "nan")), "f.txt:1: expected backward_compute_time to be 0 or more"),
    "missing": (
        node(1, figures=FIGURES.replace(", activation_size=8.0", "")),
        "f.txt:1: expected a number for activation_size, but got none",
    ),
    "word": (
        node(1, figures=FIGURES.replace("8.0", "big")),
        "f.txt:1: expected activation_size to be a number, but got 'big'",
    ),
    "key": (node(1, figures=FIGURES + ", colour=3"), "f.txt:1: expected the keys .* but got 'colour'"),
    "key twice": (
        node(1) + node(2, figures=FIGURES + ", parameter_size=3"),
        "f.txt:2: expected each key once, but got parameter_size again; drop one of them",
    ),
    "beyond reason": (
        node(1, figures=FIGURES.replace("3.0", "1e308")),
        r"f.txt:1: expected backward_compute_time to be at most 1e\+30, but got 1e308",
    ),
    "beyond reason in all": (
        node(1, figures=FIGURES.replace("8.0", "[9e29; 9e29]")),
        r"f.txt:1: expected activation_size to be at most 1e\+30, but got \[9e29; 9e29\]",
    ),
    "line": (node(1) + "hello\n", "f.txt:2: expected a node, .* but got hello"),
    "edge": (
        node(1) + "\tnode1 - node2\n",
        "f.txt:2: expected an edge, a tab and `nodeA -- nodeB`, but got node1 - node2",
    ),
    "stranger": (node(1) + "\tnode1 -- node9\n", "f.txt:2: expected an edge between nodes of this file, but got node9"),
    "twice": (node(1) + node(1), "f.txt:2: expected each node once, but got node1 again; see line 1"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_one_message_with_file_and_line(text, message):
    with pytest.raises(FormatError, match=f"^{message}"):
        from_text_profile(text, "f.txt")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FormatError, match=r"none\.txt: expected a readable text profile"):
        read_text_profile(tmp_path / "none.txt")


@pytest.mark.skipif(not SHARED.exists(), reason="the published profiles are not here")
@pytest.mark.parametrize(
    ("name", "layers", "edges"),
    [
        ("vgg16", 41, 41),
        ("resnet101", 347, 380),
        ("gnmt_large", 96, 122),
        ("bert-48-pbs-2", 53, 100),
        ("vgg-19-pbs-32", 26, 25),
    ],
)
def test_published_profiles(name, layers, edges):
    profile = read_text_profile(SHARED / f"{name}.txt")
    assert (len(profile.layers), len(profile.edges)) == (layers, edges)
    assert all(layer.seconds == 0 for layer in profile.layers if " Input" in layer.name)
