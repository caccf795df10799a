"""Wrong command lines by the hundred: each ends in figures, or in one message and code 2; never in a traceback."""

from __future__ import annotations

import json

import pytest

from commands import penstock
from damage import damaged
from penstock import schedule, simulate

WHOLE = ("0", "-1", "1", "3", "1.5", "x", "", "nan", "1e3", "2147483648", "9223372036854775808", "1" + "0" * 30)
COSTS = (
    *("0", "-1", "nan", "inf", "-inf", "1e308", "1e31", "1e30", "1e-30", "1e-320", "x", "", ",", "1,", "1,,2"),
    *("1,2", "1,2,3", "1,2,3,4,5", "1e308,1,1,1", "1,1,1,1e-320", "0x10", "1_000", "١", "1" + "0" * 400),
)
FLAGS = {
    **dict.fromkeys(("--stages", "--microbatches", "--batches", "--chunks", "--cap"), WHOLE),
    **dict.fromkeys(("--forward", "--input-grad", "--weight-grad", "--transfer", "--memory"), COSTS),
    **dict.fromkeys(("--update", "--reduce"), COSTS),
    "--weight-grad-memory": ("-1", "1.5", "nan", "inf", "1e308", "x", "1e-320", "0", "1"),
    "--replicas": ("0", "-1", "x", "", "1,2", "2,1,1,1", "1.5", "9" * 30, "1000000000", ",", "2,,1"),
    "--policy": ("pa", "pc", "", "\x00"),
}
METHODS = ("auto", "dapple", "zb-v", "pipedream")
SIZES = {"auto": 2} | dict.fromkeys(METHODS[1:], 3)  # as many micro-batches; a search over more takes its time


def lines(command: str):
    """Each flag of a command with each odd value, on each method."""
    own = ("--update", "--reduce") if command == "schedule" else ()
    for method in METHODS:
        first = (command, method) if command == "schedule" else (command, "--schedule", method)
        for flag, values in FLAGS.items():
            if flag in own:
                continue
            for value in values:
                size = str(SIZES[method])
                given = {"--stages": size, "--microbatches": size, flag: value}
                yield (*first, *(word for pair in given.items() for word in pair))


def judge(words) -> int:
    """The exit code of a command that behaved."""
    done = penstock(*words)
    assert "Traceback" not in done.stderr, words
    if done.returncode == 0:
        assert done.stdout, words
    else:
        assert done.returncode == 2, (words, done)
        said = done.stderr.strip()
        assert done.stdout == "", words
        assert said.startswith(("penstock: ", "Usage: ")), (words, said)
        assert said.count("penstock: ") == said.startswith("penstock: "), (words, said)
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("command", ["schedule", "simulate"])
def test_every_flag_with_every_odd_value(command):
    codes = [judge(words) for words in lines(command)]
    assert codes.count(2) > 300
    assert codes.count(0) > 50


FILES = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "long number": b"a = " + b"9" * 5_000,
    "large number": b"[pipeline]\nstages = 100000000000000000000\n",
    "null": b"null",
    "number": b"1",
}
READERS = (
    ("check", "FILE.csv"),
    ("simulate", "--schedule", "FILE.csv"),
    ("show", "FILE.json"),
    ("show", "FILE.json", "--json"),
    ("plan", "--profile", "FILE.json", "--cluster", "dgx-a100"),
    ("plan", "--profile", "FILE.txt", "--cluster", "dgx-a100", "--samples", "4"),
    ("cluster", "show", "FILE.toml"),
    ("train", "FILE.toml", "--inline"),
    ("verify", "FILE.toml", "--inline"),
    ("compare", "FILE.toml", "--inline"),
    ("estimate", "FILE.toml", "--device", "h100"),
    ("profile", "FILE.toml"),
)


@pytest.mark.parametrize("content", [*FILES, "directory"])
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_files_of_the_wrong_kind(words, content, tmp_path):
    word = next(word for word in words if word.startswith("FILE"))
    file = tmp_path / word
    if content == "directory":
        file.mkdir()
    elif FILES[content] is not None:
        file.write_bytes(FILES[content])
    assert judge([str(file) if each == word else each for each in words]) == 2
    done = penstock(*(str(file) if each == word else each for each in words))
    assert str(file) in done.stderr


def test_whole_numbers_of_more_than_64_bits_in_a_config(tmp_path):
    file = tmp_path / "mine.toml"
    for key, line in {"pipeline.stages": "[pipeline]\nstages", "optimizer.betas[0]": "[optimizer]\nbetas"}.items():
        value = f"[{2**63}, 1]" if key.endswith("]") else str(-(2**63) - 1)
        file.write_text(f"{line} = {value}\n")
        said = penstock("train", str(file), "--inline").stderr
        assert said.startswith(f"penstock: {file}: {key}: expected a whole number of -9223372036854775808 to ")
    assert judge(("train", "examples/gpt.toml", "--inline", "--steps", "9" * 20)) == 2


DRAWN = [
    ("--forward", "1e-320"),
    ("--forward", "1e-30"),
    ("--forward", "1e30"),
    ("--transfer", "1e30"),
    ("--forward", "1e30,1e-30,1,1"),
    ("--update", "1e30"),
]


@pytest.mark.parametrize("numbers", DRAWN, ids=" ".join)
def test_times_of_every_size_are_drawn(numbers, tmp_path):
    files = [word for kind in ("svg", "html", "trace") for word in (f"--{kind}", str(tmp_path / kind))]
    words = ("simulate", "--schedule", "zb-v", "--stages", "4", "--microbatches", "8", *numbers)
    assert judge((*words, *files)) == 0
    assert "nan" not in (tmp_path / "svg").read_text()
    assert "inf" not in (tmp_path / "svg").read_text()
    assert judge((*words, "--json")) == 0


def test_damaged_timelines_are_shown_or_refused(tmp_path):
    from random import Random

    data, random = simulate(schedule("1f1b", stages=2, microbatches=3), transfer=0.5).to_json(), Random(7)
    file, pictures = tmp_path / "line.json", [f"--{kind}={tmp_path / kind}" for kind in ("svg", "html", "trace")]
    codes = []
    for _ in range(150):
        file.write_text(json.dumps(damaged(data, random)))
        codes.append(judge(("show", str(file), *pictures)))
    assert codes.count(2) > 75
