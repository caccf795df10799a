"""The command line as a person uses it: real files, one message and code 2 for bad input; in one process, mostly."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from commands import MODULE, penstock, process, refused
from penstock import schedule, simulate, to_csv


@pytest.mark.parametrize(
    "words",
    [
        ("schedules",),
        ("schedule", "1f1b", "--stages", 2, "--microbatches", 2),
        ("check", "MINE"),
        ("simulate", "--schedule", "zb-h1", "--stages", 2, "--microbatches", 4),
        ("schedule", "1f2b", "--stages", 2, "--microbatches", 2),
    ],
    ids=str,
)
def test_a_process_of_its_own_says_the_same(words, tmp_path):
    """So that the other tests need not start one for each command."""
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(schedule("gpipe", stages=2, microbatches=4)))
    words = [file if word == "MINE" else word for word in words]
    done = process(*words)
    assert done.stdout or done.stderr
    assert penstock(*words) == done


def test_schedules_lists_every_method_as_json():
    from penstock.schedules.registry import METHODS

    done = penstock("schedules", "--json")
    assert [method["name"] for method in json.loads(done.stdout)] == list(METHODS)
    table = penstock("schedules").stdout
    assert all(name in table for name in METHODS)


def test_schedule_prints_a_grid_csv_json_and_pytorchs_csv():
    words = ("schedule", "1f1b", "--stages", 2, "--microbatches", 2)
    assert "rank 0  0F0  0F1  0B0  0B1" in penstock(*words).stdout
    built = schedule("1f1b", stages=2, microbatches=2)
    assert penstock(*words, "--format", "csv").stdout == to_csv(built)
    assert json.loads(penstock(*words, "--format", "json").stdout) == built.to_json()
    assert penstock(*words, "--format", "torch").stdout == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_simulate_json_holds_the_promised_keys_and_figures():
    done = penstock(
        *("simulate", "--schedule", "zb-h1", "--stages", 8, "--microbatches", 32),
        *("--forward", 1, "--input-grad", 1.1, "--weight-grad", 0.7, "--weight-grad-memory", 0.5, "--json"),
    )
    figures = json.loads(done.stdout)
    assert figures["idle"] == pytest.approx([9.8] * 8)
    assert figures["peak_activations"] == pytest.approx([8 - r + r * 0.5 for r in range(8)])
    assert figures["weight_versions"] == [1] * 8
    assert figures["bubble"] == pytest.approx(9.8 / figures["makespan"])
    assert figures["utilisation"] == pytest.approx(1 - figures["bubble"])
    assert len(figures["idle_own"]) == 8
    assert sum(figures["breakdown"].values()) == pytest.approx(figures["makespan"])


def test_simulate_takes_a_cost_for_each_stage_and_batches_for_asynchronous_methods():
    words = ("simulate", "--stages", 2, "--json")
    done = penstock(*words, "--schedule", "gpipe", "--microbatches", 4, "--forward", "1,2", "--transfer", "0.5")
    assert (
        json.loads(done.stdout)["makespan"]
        == simulate(schedule("gpipe", stages=2, microbatches=4), forward=[1, 2], transfer=0.5).makespan
    )
    figures = json.loads(penstock(*words, "--schedule", "pipedream", "--batches", 10).stdout)
    assert figures["weight_versions"] == [2, 1]
    assert figures["work"] == [30, 30]


def test_overlap_makes_dualpipe_vs_pairs_atomic():
    words = ("simulate", "--schedule", "dualpipe-v", "--stages", 8, "--microbatches", 32, "--json")
    assert json.loads(penstock(*words, "--overlap").stdout)["idle"][0] == pytest.approx(7.0)
    assert json.loads(penstock(*words).stdout)["idle"][0] == pytest.approx(3.5)


def test_simulate_draws_to_every_file_asked_for(tmp_path):
    svg, html, trace = tmp_path / "a.svg", tmp_path / "a.html", tmp_path / "a.json"
    words = ("simulate", "--schedule", "1f1b", "--stages", 2, "--microbatches", 2)
    done = penstock(*words, "--svg", svg, "--html", html, "--trace", trace)
    assert done.returncode == 0, done.stderr
    assert "makespan" in done.stdout
    assert ET.fromstring(svg.read_text()).tag.endswith("svg")
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


def figures(*words):
    done = penstock(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_flag_of_simulate_reaches_the_simulator():
    words = ("simulate", "--schedule", "1f1b", "--stages", 2, "--microbatches", 4)
    plain = figures(*words)
    assert figures(*words, "--update", 3)["makespan"] == plain["makespan"] + 3
    assert figures(*words, "--recompute")["work"] == [work + 4 for work in plain["work"]]
    replicated = figures(*words, "--replicas", "2,1")
    assert len(replicated["idle"]) == 3
    assert figures(*words, "--replicas", "2,1", "--reduce", "2,0")["makespan"] == replicated["makespan"] + 2
    dapple = ("simulate", "--schedule", "dapple", "--stages", 4, "--microbatches", 8)
    assert figures(*dapple, "--policy", "pb")["peak_activations"] == [7, 5, 3, 1]
    assert figures(*dapple, "--policy", "pb", "--cap", 4)["peak_activations"] == [4, 4, 3, 1]
    auto = ("simulate", "--schedule", "auto", "--stages", 3, "--microbatches", 6, "--forward", "1,3,1")
    assert max(figures(*auto, "--memory", 2)["peak_activations"]) <= 2
    assert (
        figures(*auto)["makespan"]
        == simulate(schedule("auto", stages=3, microbatches=6, forward=[1, 3, 1]), forward=[1, 3, 1]).makespan
    )


def test_asynchronous_flags_reach_the_schedule():
    words = ("schedule", "pipedream", "--stages", 3, "--batches", 6, "--format", "csv")
    assert "# law: stash" in penstock(*words).stdout
    assert "# law: vertical" in penstock(*words, "--vertical-sync").stdout
    assert "# law: newest" in penstock(*words, "--no-stash").stdout
    assert "0F0>1" in penstock(*words, "--lowered").stdout


def test_check_honours_a_memory_cap(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(schedule("gpipe", stages=2, microbatches=4)))
    assert penstock("check", file, "--memory", 4).returncode == 0
    assert "over the cap of 3" in refused("check", file, "--memory", 3)


def test_check_accepts_a_sound_file_and_simulate_runs_it(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    done = penstock("check", file)
    assert (done.returncode, "sound" in done.stdout) == (0, True)
    assert json.loads(penstock("check", file, "--json").stdout) == {"sound": True, "faults": []}
    figures = json.loads(penstock("simulate", "--schedule", file, "--json").stdout)
    assert figures["makespan"] == simulate(schedule("1f1b", stages=2, microbatches=2)).makespan


def test_check_reads_pytorchs_format_too(tmp_path):
    file = tmp_path / "torch.csv"
    file.write_text(
        penstock("schedule", "dualpipe-v", "--stages", 2, "--microbatches", 4, "--overlap", "--format", "torch").stdout
    )
    assert "OVERLAP_F_B" in file.read_text()
    assert penstock("check", file).returncode == 0


def test_check_points_at_every_fault_and_leaves_with_2(tmp_path):
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0B0,0F1,0F1\n1F0,1B0,1F1,1B1\n")
    said = refused("check", file)
    assert "0F1: occurs a second time" in said
    assert "0B1 is missing" in said
    assert "^^^" in said


def test_blocking_transfers_deadlock_1f1b(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(schedule("1f1b", stages=2, microbatches=2)))
    assert "deadlock" in refused("check", file, "--transfers", "blocking")


SIMULATE = ("simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "4")
BAD = {
    "zero stages": (("schedule", "1f1b", "--stages", 0, "--microbatches", 4), "stages to be .* at least 1, but got 0"),
    "negative micro-batches": (
        ("schedule", "1f1b", "--stages", 2, "--microbatches", -3),
        "microbatches to be .* at least 1, but got -3",
    ),
    "zero batches": (("schedule", "pipedream", "--stages", 2, "--batches", 0), "at least 1.*but got 0"),
    "zero chunks": (
        ("schedule", "interleaved", "--stages", 2, "--microbatches", 4, "--chunks", 0),
        r"1 to 65536 chunk.*but got 0",
    ),
    "no micro-batches": (("schedule", "1f1b", "--stages", 2), "a number of micro-batches for 1f1b"),
    "no stages": (("schedule", "1f1b", "--microbatches", 2), "a number of stages for 1f1b"),
    "an unknown method": (("schedule", "1f2b", "--stages", 2, "--microbatches", 2), "'1f2b'; try 1f1b"),
    "interleaved m": (
        ("schedule", "interleaved", "--stages", 4, "--microbatches", 6),
        "multiple of its 4 stages, but got 6",
    ),
    "dualpipe-v m": (("schedule", "dualpipe-v", "--stages", 4, "--microbatches", 7), "twice its 4 stages, but got 7"),
    "2bw m": (("schedule", "2bw", "--stages", 4, "--microbatches", 3), "depth of 4 stages, but got 3"),
    "chunks of zb-v": (
        ("schedule", "zb-v", "--stages", 2, "--microbatches", 4, "--chunks", 3),
        r"exactly 2 chunk.*but got 3",
    ),
    "an option of another method": (
        ("schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--policy", "pa"),
        r"options that 1f1b has \(none\), but got policy",
    ),
    "a policy that is none": (
        ("schedule", "dapple", "--stages", 2, "--microbatches", 2, "--policy", "pc"),
        "'pa' or 'pb', but got 'pc'",
    ),
    "vertical sync without stash": (
        ("schedule", "pipedream", "--stages", 2, "--vertical-sync", "--no-stash"),
        "weight stashing where vertical_sync is on",
    ),
    "a format that is none": (
        ("schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--format", "xml"),
        "grid, csv, json or torch, but got 'xml'",
    ),
    "costs of the wrong length": (
        (*SIMULATE, "--forward", "1,2,3"),
        r"forward to be one number or one for each of 2 stages, but got \[1.0, 2.0, 3.0\]",
    ),
    "a NaN cost": ((*SIMULATE, "--input-grad", "nan"), r"input_grad to be finite and 0 or more, but got \[nan\]"),
    "a negative cost": (
        (*SIMULATE, "--weight-grad", "-1"),
        r"weight_grad to be finite and 0 or more, but got \[-1.0\]",
    ),
    "an infinite transfer": ((*SIMULATE, "--transfer", "inf"), r"transfer to be finite and 0 or more, but got \[inf\]"),
    "a cost that is no number": ((*SIMULATE, "--forward", "fast"), "--forward to be a number.*but got 'fast'"),
    "AW above A": ((*SIMULATE, "--weight-grad-memory", "1.5"), "between 0 and 1, but got 1.5"),
    "replicas of the wrong length": ((*SIMULATE, "--replicas", "1,2,3"), "each of 2 ranks, but got"),
    "replicas that are no number": ((*SIMULATE, "--replicas", "two"), "whole numbers, but got 'two'"),
    "no number at all": ((*SIMULATE[:2], "auto", *SIMULATE[3:], "--memory", ""), "--memory to be a number"),
    "more micro-batches than can be counted": (
        ("schedule", "1f1b", "--stages", 2, "--microbatches", 3_000_000_000),
        "at most 2147483647",
    ),
    "more batches than can be counted": (
        ("schedule", "pipedream", "--stages", 2, "--batches", 10**11),
        "to be at most",
    ),
    "more stages than anyone has": (("schedule", "1f1b", "--stages", 10**8, "--microbatches", 2), "to be at most"),
    "costs for a method without": (
        ("schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--forward", "nan"),
        "costs for auto alone",
    ),
    "a file and its shape": (
        ("simulate", "--schedule", "mine.csv", "--stages", 9, "--overlap"),
        "a file, which states its shape, but got --stages, --overlap",
    ),
    "a missing file": (("check", "nowhere.csv"), "nowhere.csv: expected a readable CSV file.*No such file"),
    "a picture that cannot be written": (
        (*SIMULATE, "--svg", "/nowhere/a.svg"),
        "a file that can be written for --svg",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message_naming_value_and_rule(case):
    import re

    arguments, said = BAD[case]
    message = refused(*arguments)
    assert message.startswith("penstock: ")
    assert message.count("\n") == 1, "one message, one line"
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("text", "said"),
    [("0F0,0Q1\n", "cell 2"), ("0F0,0F1,0B\n", "cell 3"), ("0F0,0B0\n1F0,1B0\n", None), ("\x00\xff", "expected")],
)
def test_check_of_files_that_are_no_schedules(tmp_path, text, said):
    file = tmp_path / "mine.csv"
    file.write_bytes(text.encode("latin-1"))
    if said is None:
        assert penstock("check", file).returncode == 0
    else:
        assert said in refused("check", file)


def test_help_has_an_example_for_every_command():
    for command in ("schedules", "schedule", "check", "simulate", "train", "verify"):
        assert "Example" in penstock(command, "--help").stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["simulate", "--schedule", "auto", "--stages", "3", "--microbatches", "4", "--json"]]
)
def test_no_compiler_and_no_torch_on_the_way_of_small_work(arguments):
    code = (
        "import sys\nfrom penstock.cli import main\n"
        f"sys.argv = ['penstock', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'numba', 'penstock.app'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_auto_with_nothing_to_do_is_no_division_by_zero():
    zero = ("--forward", 0, "--input-grad", 0, "--weight-grad", 0)
    words = ("simulate", "--schedule", "auto", "--stages", 2, "--microbatches", 4, "--chunks", 2, "--memory", 3)
    assert figures(*words, *zero)["makespan"] == 0


def test_a_terminal_without_signs_and_a_full_disk_get_no_traceback(tmp_path):
    import os

    words = [*MODULE, "simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    done = subprocess.run(words, capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    if os.path.exists("/dev/full"):  # noqa: PTH110
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = subprocess.run([*words, "--json"], stdout=full, stderr=subprocess.PIPE, timeout=60)
        assert b"Traceback" not in done.stderr


def test_the_package_itself_runs_as_the_command():
    words = ("schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    done = subprocess.run([sys.executable, "-m", "penstock", *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == penstock(*words)
