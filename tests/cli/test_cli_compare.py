"""`penstock compare` as a person uses it: on real workers, in one process, and with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from commands import LAUNCHED, forked, process

BROKEN = Path(__file__).parent.parent / "app" / "run" / "broken.py"
SMALL = """
[model]
kind = "gpt"
width = 16
heads = 2
layers = 4
length = 8
[pipeline]
stages = 2
microbatches = 2
[optimizer]
lr = 1e-2
[training]
steps = 8
batch = 8
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def here(monkeypatch, capsys, *arguments):
    """The command in this process, which has torch already: its code and what it said."""
    from penstock.cli import main

    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="more stages than cores")
def test_on_workers_times_are_measured_and_losses_are_those_of_one_process(small, monkeypatch, capsys):
    names = "plain,1f1b,2bw,pipemare-t1-t2-t3"
    done = forked("compare", small, "--methods", names, "--json", ranks=3)  # one for the plain process
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["clock"] == "measured on 2 workers"
    code, inline = here(monkeypatch, capsys, "compare", small, "--methods", names, "--inline", "--json")
    assert code == 0
    other = json.loads(inline.out)
    assert other["clock"] == "simulated"
    for mine, theirs in zip(told["methods"], other["methods"], strict=True):
        assert mine["note"] is None, mine
        assert mine["name"] == theirs["name"]
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert mine["samples_per_second"] > 0
        assert 0 < mine["utilisation"] <= 1
        assert mine["memory"] == pytest.approx(theirs["memory"], rel=0.25)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == names.split(",")


def test_a_table_and_pictures(small, tmp_path, monkeypatch, capsys):
    svg, html = tmp_path / "loss.svg", tmp_path / "new" / "all.html"
    words = ("compare", small, "--methods", "1f1b, pipedream", "--stages", 3, "--inline", "--svg", svg, "--html", html)
    code, told = here(monkeypatch, capsys, *words, "--steps", 6)
    assert code == 0
    title, heads, *rows = told.out.splitlines()
    assert title == "3 stages, mini-batches of 8 in 2 micro-batches, 48 samples"
    assert heads.split()[:3] == ["method", "samples/s", "busy"]
    assert [row.split()[0] for row in rows[:2]] == ["1f1b", "pipedream"]
    assert rows[2].startswith("times simulated from stage times measured inline")
    assert svg.read_text().startswith("<svg")
    assert html.read_text().startswith("<!doctype html>")
    assert told.err.count("wrote ") == 2


def test_a_comparison_of_nothing_that_runs_leaves_with_1(small, monkeypatch, capsys):
    code, told = here(monkeypatch, capsys, "compare", small, "--methods", "2bw", "--stages", 3, "--inline")
    assert code == 1
    assert "2bw: expected 2bw's microbatches to be at least its depth of 3 stages, but got 2" in told.out


BAD = {
    "an unknown method": (("--methods", "1f1b,pipedreem"), None, "'pipedreem'; try pipedream"),
    "no method": (("--methods", ","), None, "the names of some methods"),
    "no steps": (("--steps", 0), None, "training.steps: expected a whole number of at least 1, but got 0"),
    "no stages": (("--stages", 0), None, "pipeline.stages: expected a whole number of at least 1, but got 0"),
    "too many stages": (("--stages", 90), None, "stages for this model's layers, but got 90"),
    "no learning rate": ((), ("lr = 1e-2", ""), "optimizer.lr: expected the learning rate that all methods share"),
    "a K of nothing": (("--t1", 0), None, "--t1 to be at least 1"),
    "a picture that cannot be written": (("--svg", "/proc/nowhere/a.svg"), None, "a picture that can be written"),
    "a fault in the config": ((), ("heads = 2", "heads = 3"), "model.width: expected a multiple of its 3 heads"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message(small, monkeypatch, capsys, case):
    flags, change, said = BAD[case]
    if change is not None:
        small.write_text(SMALL.replace(*change))
    code, told = here(monkeypatch, capsys, "compare", small, "--inline", *flags)
    assert (code, told.out) == (2, "")
    assert told.err.count("penstock: ") == 1
    assert re.search(re.escape(said), told.err), told.err


def test_a_refusal_as_a_process_has_no_traceback(small):
    done = process("compare", small, "--methods", "1f1b,pipedreem")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_workers_that_fail_leave_the_reason_and_the_rest_goes_on(small, monkeypatch):
    """Divergence ends the ranks; those that come after it are trained by new ones."""
    from penstock.app.compare import runs as compare_runs
    from penstock.app.compare.methods import NAMED
    from penstock.app.compare.result import Cause
    from penstock.app.compare.runs import FOUND, REFUSED, RunResult
    from penstock.app.compare.track import Track
    from penstock.app.run.request import Request

    diverged = Cause("diverged after 3 mini-batches")
    names = ["1f1b", "gpipe", "2bw", "naive"]
    runs = [compare_runs.MethodRun(NAMED[name], Request(str(small)), Track()) for name in names]
    started = []

    def launch(command, workers, words):
        flags = json.loads(command[command.index("--flags") + 1])
        folder, numbers = Path(flags["out"]), [number for number, _ in flags["runs"]]
        started.append((workers, len(numbers)))
        for number in numbers:
            if (len(started), number) == (1, 1):
                (folder / REFUSED.format(1, 1)).write_text(json.dumps(diverged.to_json()))
                return 2
            if (len(started), number) == (2, 1):
                print("Traceback ...\nMemoryError: too much", file=words, flush=True)
                return 1
            (folder / FOUND.format(number)).write_text(json.dumps(RunResult({0: {}}, 0.5).to_json()))
        return 0

    monkeypatch.setattr(compare_runs, "launch", launch)
    compare_runs.run_on_workers(runs, 2)
    assert started == [(2, 4), (2, 2)]
    causes = [run.cause for run in runs]
    assert causes[::2] == [None, None]
    assert causes[1] == diverged
    assert causes[3] == Cause("MemoryError: too much", True, "Traceback ...\nMemoryError: too much\n")
    assert [run.result is not None for run in runs] == [True, False, True, False]


UNLUCKY = """
[model]
factory = "broken:make_unlucky"
arguments = {{how = "{how}", call = 9}}
[data]
factory = "broken:make_batches"
[pipeline]
stages = 2
microbatches = 4
[optimizer]
lr = 1e-2
[training]
steps = 6
batch = 8
loss = "mse"
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="more stages than cores")
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_method_that_fails_on_a_worker_shows_why_and_leaves_with_1(tmp_path, how):
    """Once only "rank 1 ended with code 1" was said, and the command left with 0."""
    shutil.copy(BROKEN, tmp_path)
    file = tmp_path / "unlucky.toml"
    file.write_text(UNLUCKY.format(how=how))
    done = forked("compare", file, "--methods", "plain,1f1b,2bw,gpipe", "--json", ranks=7)
    assert done.returncode == 1, done.stderr
    plain, *rows = json.loads(done.stdout)["methods"]
    assert not plain["failed"]
    assert len(plain["losses"]) == 6
    for row in rows:
        assert row["failed"]
        assert len(row["losses"]) < 6
        if how == "raise":
            source = BROKEN.read_text().splitlines()
            line = 1 + source.index('            raise ValueError("no such luck")')
            assert row["note"] == f"ValueError: no such luck, at {tmp_path / 'broken.py'}:{line}, in forward"
        else:
            killed = (
                r"rank 1 ended by signal 9 \(SIGKILL\), possibly out of memory, in 1F\d.*\(stage 1, micro-batch \d+\)"
            )
            assert re.fullmatch(killed, row["note"]), row["note"]
    if how == "raise":
        assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
        assert "1f1b, 2bw, gpipe:\nTraceback" in done.stderr
        assert re.search(r"^rank 1 failed in 1F\d+ \(stage 1, micro-batch \d+\): ValueError", done.stderr, re.MULTILINE)


def test_a_signal_ends_the_whole_command(small, monkeypatch):
    from penstock.app.compare import runs as compare_runs
    from penstock.app.compare.methods import NAMED
    from penstock.app.compare.track import Track
    from penstock.app.run.request import Request

    monkeypatch.setattr(compare_runs, "launch", lambda command, workers, words: 130)
    with pytest.raises(SystemExit) as end:
        compare_runs.run_on_workers([compare_runs.MethodRun(NAMED["1f1b"], Request(str(small)), Track())], 2)
    assert end.value.code == 130
