"""Bad input to `penstock plan`: one message each, from the command line and in Python, that names file, line or key."""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy

import pytest

from penstock import Cluster, Device, FormatError, InputError, Layer, Level, Profile, plan, read_cluster, read_profile
from penstock.app.plan.command import plan_command
from penstock.app.plan.output import as_json, changes_that_fit
from penstock.cli import main

FIGURES = "forward_compute_time=1.5, backward_compute_time=3.0, activation_size=8.0, parameter_size=2"
NODES = "".join(f"node{n} -- Linear(4, 4) -- {FIGURES}\n" for n in (1, 2, 3))
CLUSTER = "devices = 2\n[kinds.d]\nmemory = 1e4\n[inside]\nbandwidth = 8.0\n"
LAYERS = Profile(tuple(Layer(f"L{at}", 1.0, 1.0, 1.0, 5, 1, parameter_bytes=10) for at in range(4)))
BIG = Profile(tuple(Layer(f"L{at}", 1.0, 1.0, 1.0, parameter_bytes=1e6) for at in range(4)))


@pytest.fixture
def written(tmp_path):
    """Files by name: text as it is, else as JSON."""

    def write(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def refused(monkeypatch, capsys):
    """The one message that the command prints on its way out with code 2."""

    def run(profile, cluster, *words):
        asked = ["penstock", "plan", "--profile", profile, "--cluster", cluster, *words]
        monkeypatch.setattr(sys, "argv", [str(word) for word in asked])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert (left.value.code, said.out) == (2, "")
        assert said.err.startswith("penstock: ")
        assert said.err.count("\n") == 1
        return said.err.removeprefix("penstock: ").rstrip("\n")

    return run


def changed(change):
    data = deepcopy(LAYERS.to_json())
    change(data)
    return data


GRAPHS = {
    "empty text": ("p.txt", "", "p.txt: expected a graph with at least one node, but got none"),
    "empty JSON": (
        "p.json",
        changed(lambda data: data.update(layers=[], edges=[])),
        "p.json: expected a profile with at least one layer, but got none",
    ),
    "cyclic text": (
        "p.txt",
        NODES + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node1\n",
        "p.txt:6: expected a graph without cycles, but got node1 -> node2 -> node3 -> node1",
    ),
    "cyclic JSON": (
        "p.json",
        changed(lambda data: data.update(edges=[[0, 1], [1, 2], [2, 0]])),
        "p.json: expected edges from an earlier to a later of 4 layers (no cycles), but got (2, 0)",
    ),
    "negative in text": (
        "p.txt",
        NODES.replace("3.0", "-3.0", 1),
        "p.txt:1: expected backward_compute_time to be 0 or more, but got -3.0",
    ),
    "negative in JSON": (
        "p.json",
        changed(lambda data: data["layers"][2].update(forward=-1)),
        "p.json: expected forward of layer 'L2' to be a number of 0 or more, but got -1",
    ),
    "negative bytes in JSON": (
        "p.json",
        changed(lambda data: data.update(sent=[[1, [2], -4]])),
        "p.json: expected bytes of a tensor that layer 1 sends to be a number of 0 or more, but got -4",
    ),
    "missing in text": (
        "p.txt",
        NODES.replace(", parameter_size=2", "", 1),
        "p.txt:1: expected a number for parameter_size, but got none",
    ),
    "missing in JSON": (
        "p.json",
        changed(lambda data: data["layers"][2].pop("forward")),
        "p.json: expected the figures of a layer in layers[2], but got no forward",
    ),
    "unknown in JSON": (
        "p.json",
        changed(lambda data: data["layers"][1].update(colour=1)),
        "p.json: expected the figures of a layer in layers[1], but got the unknown key 'colour'",
    ),
    "a word in JSON": (
        "p.json",
        changed(lambda data: data["layers"][0].update(forward="fast")),
        "p.json: expected forward of layer 'L0' to be a number of 0 or more, but got 'fast'",
    ),
    "no rows in JSON": (
        "p.json",
        changed(lambda data: data.update(samples=0)),
        "p.json: expected samples to be a whole number of at least 1, but got 0",
    ),
    "beyond reason in JSON": (
        "p.json",
        changed(lambda data: data["layers"][0].update(forward=1e308)),
        "p.json: expected forward of layer 'L0' to be at most 1e+30, but got 1e+308",
    ),
    "400 digits in JSON": (
        "p.json",
        changed(lambda data: data["layers"][0].update(kept_bytes=10**399)),
        "p.json: expected kept_bytes of layer 'L0' to be at most 1e+30, but got about 1e399",
    ),
    "brackets for a profile": (
        "p.json",
        "[" * 100_000,
        "p.json: expected a profile as JSON, but got brackets nested too deeply",
    ),
    "a key twice": (
        "p.txt",
        NODES.replace("activation_size", "parameter_size", 1),
        "p.txt:1: expected each key once, but got parameter_size again; drop one of them",
    ),
    "a list for a profile": ("p.json", [], "p.json: expected a profile as to_json writes it"),
}


@pytest.mark.parametrize(("name", "content", "message"), GRAPHS.values(), ids=GRAPHS)
def test_graphs_and_numbers(written, refused, name, content, message):
    path = written(name, content)
    with pytest.raises(FormatError) as error:
        read_profile(path)
    assert str(error.value).startswith(f"{path.parent}/{message}")
    assert refused(path, written("c.toml", CLUSTER)) == str(error.value)


CLUSTERS = {
    "an unknown key": (
        CLUSTER + "bandwith = 8.0\n",
        "inside.bandwith: expected one of the keys name, bandwidth, ",
        "the unknown key 'bandwith'; write bandwidth",
    ),
    "an unknown key at the top": ("colour = 1\n" + CLUSTER, "colour: expected", "the unknown key 'colour'; drop it"),
    "an unknown key of a kind": (
        CLUSTER.replace("memory", "memry"),
        "kinds.d.memry: expected",
        "the unknown key 'memry'; write memory",
    ),
    "a negative number": (
        CLUSTER.replace("1e4", "-1e4"),
        "kinds.d.memory: expected a number above 0, but got -10000.0",
        "correct the value",
    ),
    "a missing number": (
        CLUSTER.replace("bandwidth = 8.0", "latency = 1.0"),
        "inside.bandwidth: expected bytes/s of a transfer, but got none",
        "add it",
    ),
    "nothing": ("", "devices: expected the key, for example devices = 8, but got none", "add it"),
}


@pytest.mark.parametrize(("text", "begins", "ends"), CLUSTERS.values(), ids=CLUSTERS)
def test_cluster_files(written, refused, text, begins, ends):
    path = written("c.toml", text)
    with pytest.raises(FormatError) as error:
        read_cluster(path)
    assert str(error.value).startswith(f"{path}: {begins}")
    assert str(error.value).endswith(ends)
    assert refused(written("p.json", LAYERS.to_json()), path) == str(error.value)


@pytest.mark.parametrize("method", ["balance", "gpipe"])
def test_more_stages_than_layers(written, refused, method):
    message = "expected at most 4 stages, one for each layer, but got 5; ask for fewer stages"
    eight = Cluster.uniform((Level("inside", 8, 8.0),))
    with pytest.raises(InputError) as error:
        plan(LAYERS, eight, method=method, stages=5)
    assert str(error.value) == message
    files = written("p.json", LAYERS.to_json()), written("c.toml", CLUSTER.replace("devices = 2", "devices = 8"))
    assert refused(*files, "--method", method, "--stages", 5) == message


METHOD = "the name of a method, but got "
WHOLE = "stages to be a whole number of at least 1, but got "
OPTIONS = [
    ("balance", {"schedule": "zz"}, METHOD + "'zz'; choose one of naive, gpipe, 1f1b"),
    ("balance", {"schedule": None}, METHOD + "a NoneType; choose one of naive"),
    ("gpipe", {"schedule": ["1f1b"]}, METHOD + "a list; try 1f1b"),
    ("balance", {"stages": 2.0}, WHOLE + "2.0; change stages"),
    ("balance", {"stages": "2"}, WHOLE + "'2'; change stages"),
    ("gpipe", {"stages": True}, WHOLE + "True; change stages"),
    ("pipedream", {"constant": []}, r"constant to be one of paper, text, code, but got \[\]; choose one of them"),
    ("pipedream", {"memory": "no"}, "memory to be True or False, but got 'no'; change memory"),
    (
        "balance",
        {"microbatches": 3},
        "options of the method, but got microbatches; .* batch and microbatch, which count",
    ),
    ("pipedream", {"microbatches": 3}, "options of the method, but got microbatches; .* which count rows"),
    ("balance", {"judges": 3}, "options of the method, but got judges; leave it out"),
    ("balance", {"microbatch": 10**400}, "microbatch to be at most 1000000000000, but got about 1e400"),
]


@pytest.mark.parametrize(("method", "options", "said"), OPTIONS, ids=lambda part: str(part)[:30])
def test_options_of_another_kind(method, options, said):
    with pytest.raises(InputError, match=f"^expected {said}"):
        plan(LAYERS, Cluster.uniform((Level("inside", 2, 8.0),)), method=method, **options)


@pytest.mark.parametrize("method", ["search", "pipedream", "dapple", "2bw"])
@pytest.mark.parametrize("size", [2**62, 2**64])
def test_whole_numbers_of_more_than_64_bits_are_as_large_as_they_say(written, refused, size, method):
    """Arrays of whole numbers would wrap around, and a model of exabytes fit anywhere."""
    one = Layer("L", 1.0, 1.0, 1.0, output_bytes=size, kept_bytes=size, parameter_bytes=size, optimizer_bytes=size)
    files = written("p.json", Profile((one,) * 4).to_json()), written("c.toml", CLUSTER)
    assert " GB short; what would fit: " in refused(*files, "--method", method)


@pytest.mark.parametrize("seconds", [0.0, 1e-320, 1e-13])
def test_a_profile_that_takes_hardly_any_time_takes_none(written, refused, seconds):
    """Rows a second would be without end, which JSON cannot say."""
    idle = Profile(tuple(Layer(f"L{at}", seconds, 0.0, 0.0) for at in range(4)))
    files = written("p.json", idle.to_json()), written("c.toml", CLUSTER)
    said = refused(*files, "--method", "balance", "--json")
    assert said == (
        f"expected a profile in which some layer takes time, but got {4 * seconds:g} seconds in all; "
        "measure or estimate it again"
    )


@pytest.mark.parametrize("method", ["balance", "all"])
def test_json_never_has_an_infinity(written, monkeypatch, method):
    monkeypatch.setattr("penstock.app.plan.command.as_json", lambda found: {"throughput": float("inf")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        plan_command(written("p.json", LAYERS.to_json()), written("c.toml", CLUSTER), method, json_wanted=True)


@pytest.mark.parametrize("method", ["search", "pipedream", "dapple", "2bw"])
def test_a_model_larger_than_the_cluster(written, refused, method):
    """Two devices of 10 kB, a model of 4 MB of weights."""
    small = Cluster.uniform((Level("inside", 2, 8.0),), Device("d", 1e4))
    with pytest.raises(InputError, match=r"fits? (the )?1e-05 GB .* 2 device") as error:
        plan(BIG, small, method=method)
    said = refused(written("p.json", BIG.to_json()), written("c.toml", CLUSTER), "--method", method)
    assert said == str(error.value)


def test_methods_that_know_no_memory_say_what_is_short(written, monkeypatch, capsys):
    files = written("p.json", BIG.to_json()), written("c.toml", CLUSTER)
    for method in ("balance", "gpipe"):
        words = ["penstock", "plan", "--profile", files[0], "--cluster", files[1], "--method", method]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        said = capsys.readouterr().out
        assert "does not fit: device 0 is 0.00399 GB short, 2 device(s) in all" in said
        assert "what would fit: devices of 0.004" in said  # nothing smaller: the weights alone are too much


def activations_that_do_not_fit(memory):
    """Four layers of 1 kB of weights that keep 1 MB of each of 8 rows, on two devices of so much memory."""
    layers = tuple(
        Layer(f"l{i}", 1.0, 1.0, 1.0, output_bytes=1e3, kept_bytes=8e6, parameter_bytes=1e3) for i in range(4)
    )
    profile, cluster = Profile(layers, samples=8), Cluster.uniform((Level("inside", 2, 1e9),), Device("d", memory))
    return profile, plan(profile, cluster, method="balance", batch=64, schedule="1f1b")


def test_a_plan_that_does_not_fit_says_the_smallest_changes_that_would():
    profile, found = activations_that_do_not_fit(20e6)
    assert sorted(found.over) == [0]  # two micro-batches of two layers: 32 MB
    ways = changes_that_fit(found)
    assert [way.what for way in ways] == [
        "micro-batches of 4 row(s) in place of 8",
        "recompute of stage(s) 0",
        "devices of 0.03201 GB",  # with the weights
    ]
    assert ways[0].more < 0 < ways[1].more < 0.34
    assert as_json(found)["would_fit"][1]["what"] == "recompute of stage(s) 0"
    again = plan(profile, found.cluster, method="balance", batch=64, microbatch=4, schedule="1f1b")
    assert not again.over  # the advice is true
    assert again.step_seconds == pytest.approx(found.step_seconds * (1 + ways[0].more))


def test_a_plan_that_fits_needs_no_change():
    _, found = activations_that_do_not_fit(40e6)
    assert changes_that_fit(found) == []
    assert as_json(found)["would_fit"] == []


@pytest.mark.parametrize("method", ["pipedream", "dapple", "2bw", "search"])
def test_planners_that_find_nothing_say_what_would_fit(method):
    """Eight layers of 8 MB of weights; more devices help all but pipedream, which then stashes more versions."""
    layers = tuple(Layer(f"l{i}", 1.0, 1.0, 1.0, kept_bytes=1e5, parameter_bytes=8e6) for i in range(8))
    profile, room = Profile(layers, samples=8), 30e6
    given = {"recompute": False, "schedules": "synchronous"} if method == "search" else {}

    def planned(devices, memory):
        return plan(
            profile, Cluster.uniform((Level("inside", devices, 1e9),), Device("d", memory)), method=method, **given
        )

    with pytest.raises(InputError, match=r"a plan that fits 0.03 GB a device on 2 .* GB short; what would fit: ") as no:
        planned(2, room)
    advice = str(no.value).partition("what would fit: ")[2]
    more = re.search(r"(\d+) such devices in place of 2", advice)
    assert (more is None) == (method == "pipedream")
    assert more is None or not planned(int(more[1]), room).over
    assert not planned(2, float(re.search(r"devices of ([\d.]+) GB", advice)[1]) * 1e9).over
