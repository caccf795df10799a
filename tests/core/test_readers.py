"""Every reader, given damaged data: one message of penstock's own, or something that can be used."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from random import Random

import pytest

from damage import damaged, garbled
from penstock import Cluster, Level, Plan, Profile, Schedule, from_csv, schedule, simulate
from penstock.core.check import check
from penstock.core.cluster_file import read_cluster
from penstock.core.cluster_toml import to_toml
from penstock.core.json_file import read_json
from penstock.core.plan import StagePlan
from penstock.core.profile import Layer
from penstock.core.shape import Shape
from penstock.core.text import to_csv
from penstock.core.timeline import Timeline
from penstock.core.torch_text import from_torch_csv, to_torch_csv
from penstock.errors import FormatError, PenstockError
from penstock.reports.figures import headline
from penstock.reports.gantt import gantt
from penstock.reports.html import html
from penstock.reports.svg import svg
from penstock.reports.tables import summary
from penstock.reports.trace import trace

EACH, BLOCKS = 250, 4


def timelines():
    return [
        simulate(schedule("1f1b", stages=3, microbatches=3), transfer=0.5, update=0.5),
        simulate(schedule("zb-v", stages=2, microbatches=4)),
        simulate(schedule("pipedream", stages=2, batches=5, replicas=(2, 1)), reduce=0.5),
        simulate(schedule("dualpipe-v", stages=2, microbatches=4, overlap=True)),
    ]


def drawn(line: Timeline) -> None:
    """All that `show` does with one."""
    line.figures()
    headline(line)
    for writer in (svg, html, trace, gantt, summary):
        writer(line)


def judged(built: Schedule) -> None:
    """What cannot be lowered has a message too."""
    with contextlib.suppress(PenstockError):
        check(built)


def profile() -> Profile:
    layers = tuple(Layer(f"l{at}", 1.0, 1.0, 1.0, 8.0, kept_bytes=8.0, parameter_bytes=4.0) for at in range(3))
    return Profile(layers, ((0, 1), (1, 2), (0, 2)))


def cluster() -> Cluster:
    return Cluster.uniform((Level("host", 2, 1e9), Level("network", 2, 1e8, 1e-5, shared=True)))


def plan() -> Plan:
    return Plan(
        (StagePlan(0, 1), StagePlan(2, 2)), (0, 1), (((0,),), ((1,),)), "dapple", 4, options=(("policy", "pa"),)
    )


NOUNS = {
    "timeline": ([line.to_json() for line in timelines()], Timeline.from_json, drawn),
    "schedule": ([line.schedule.to_json() for line in timelines()], Schedule.from_json, judged),
    "shape": ([line.schedule.shape.to_json() for line in timelines()], Shape.from_json, str),
    "profile": ([profile().to_json()], Profile.from_json, str),
    "cluster": ([cluster().to_json()], Cluster.from_json, str),
    "plan": ([plan().to_json()], Plan.from_json, str),
}
TEXTS = {
    "csv": ([to_csv(line.schedule) for line in timelines()], from_csv, judged),
    "torch csv": ([to_torch_csv(schedule("1f1b", stages=2, microbatches=3))], from_torch_csv, judged),
}


def outcome(read, use, given) -> str:
    try:
        found = read(given)
    except PenstockError:
        return "refused"
    use(found)
    return "read"


@pytest.mark.parametrize("seed", range(BLOCKS))
@pytest.mark.parametrize("noun", NOUNS)
def test_damaged_json_gets_one_message_or_can_be_used(noun, seed):
    samples, read, use = NOUNS[noun]
    random, ends = Random(f"{noun} {seed}"), Counter()
    for _ in range(EACH):
        data = damaged(random.choice(samples), random)
        ends[outcome(read, use, data)] += 1
    assert ends["refused"] > EACH / 4, ends


@pytest.mark.parametrize("seed", range(BLOCKS))
@pytest.mark.parametrize("kind", TEXTS)
def test_garbled_text_gets_one_message_or_can_be_used(kind, seed):
    samples, read, use = TEXTS[kind]
    random, ends = Random(f"{kind} {seed}"), Counter()
    for _ in range(EACH):
        ends[outcome(read, use, garbled(random.choice(samples), random))] += 1
    assert ends["refused"] > EACH / 8, ends


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_garbled_cluster_files(seed, tmp_path):
    random, ends, file = Random(f"toml {seed}"), Counter(), tmp_path / "cluster.toml"
    text = to_toml(cluster())
    for _ in range(EACH):
        file.write_text(garbled(text, random), errors="replace")
        ends[outcome(read_cluster, str, file)] += 1
    assert ends["refused"] > EACH / 8, ends


@pytest.mark.parametrize("noun", NOUNS)
def test_what_is_whole_is_read(noun):
    samples, read, use = NOUNS[noun]
    for sample in samples:
        use(read(json.loads(json.dumps(sample))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": None}, "start to be a list of .* numbers, but got None"),
        ({"start": []}, "start to be a list of .* numbers, but got 0 of them"),
        ({"end": lambda end: [*end[:-1], "x"]}, "end to be finite numbers.*'x'"),
        ({"end": lambda end: [*end[:-1], 1e308]}, "at most 1e.30, but got 1e.308"),
        ({"end": lambda end: [-5.0, *end[1:]]}, "end no earlier than they start, but got 0F0"),
        ({"measured": "no"}, "measured to be True or False, but got 'no'"),
        ({"memory": {"standing": {}, "begun": {}, "ended": {"held": []}}}, "ended of held to be a list of"),
        ({"timeline": lambda built: built | {"lowered": False}}, "a lowered schedule|compute actions alone"),
        ({"timeline": lambda built: built | {"slots": built["slots"][::-1]}}, "a sound schedule"),
    ],
)
def test_a_damaged_timeline_says_what_is_wrong_and_in_which_file(change, said, tmp_path):
    data = timelines()[0].to_json()
    data |= {key: made(data[key]) if callable(made) else made for key, made in change.items()}
    file = tmp_path / "step.json"
    file.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=said) as caught:
        read_json(file, "timeline", Timeline.from_json, "write it again")
    assert str(caught.value).startswith(f"{file}: expected ")


def test_numbers_that_few_actions_cannot_mean_are_refused_at_once():
    """Not by running out of memory: the laws have tables of every stage and micro-batch."""
    with pytest.raises(PenstockError, match=r"4000000000 forwards.*but got 8 actions in all"):
        from_csv("# microbatches: 2000000000\n0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
