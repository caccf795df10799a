"""`penstock train` and `penstock verify` as a person uses them: real workers, one message for bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import LAUNCHED, environment, forked, process, python, refused

ROOT = Path(__file__).parent.parent.parent
WORKERS = {"ranks": 2}
SMALL = """
[model]
kind = "gpt"
width = 16
heads = 2
layers = 4
length = 16
[pipeline]
stages = 2
microbatches = 4
[optimizer]
lr = 1e-2
[training]
steps = 12
batch = 16
log_every = 4
plain_steps = 0
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def losses(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["losses"]


def test_training_on_workers_gives_the_losses_of_one_process(small):
    workers, inline = losses(process("train", small, "--json")), losses(forked("train", small, "--json", "--inline"))
    assert workers == inline
    assert len(workers) == 12
    assert sum(workers[-3:]) < sum(workers[:3])


def test_training_on_workers_ends_in_a_table_and_a_report(small, tmp_path):
    done = forked("train", small, "--steps", 6, "--report", tmp_path / "new" / "run.html", **WORKERS)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d+)/6  loss \d", done.stdout, re.MULTILINE) == ["1", "4", "6"]
    for name in ("2 workers", "time per step", "bubble", "memory, each", "traffic per step"):
        assert name in done.stdout
    page = (tmp_path / "new" / "run.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "measured" in page
    assert "predicted from the steps before" in page


def test_the_figures_of_a_run_as_json(small):
    told = json.loads(forked("train", small, "--steps", 5, "--json", **WORKERS).stdout)
    assert 0 < told["timeline"]["bubble"] < 1
    assert len(told["memory"]) == 2
    assert told["traffic"] > 0
    assert told["seconds_per_step"] > 0


def test_validation_and_a_sample_on_workers_are_those_of_one_process(small, tmp_path):
    more = SMALL.replace("steps = 12", "steps = 12\nsample = 30").replace(
        "[pipeline]", "[data]\nvalidation = 0.1\n[pipeline]"
    )
    small.write_text(more)
    page = tmp_path / "run.html"
    workers = forked("train", small, "--json", "--report", page, **WORKERS)
    inline = json.loads(forked("train", small, "--json", "--inline").stdout)
    told = json.loads(workers.stdout)
    assert (told["validation"], told["sample"]) == (inline["validation"], inline["sample"])
    assert len(told["sample"]) == 30
    notes = re.search(r'<pre id="notes">(.*?)</pre>', page.read_text(), re.DOTALL)[1]
    figures = [format(told["validation"][name], ".4f") for name in ("loss", "unigram_entropy")]
    assert f"validation loss {figures[0]} on held-out text, whose unigram entropy is {figures[1]}" in notes
    assert "a sample of what the model writes:" in notes


def test_a_share_to_hold_out_that_is_none_is_refused_once(small):
    small.write_text(SMALL.replace("[pipeline]", "[data]\nvalidation = 1e-6\n[pipeline]"))
    done = forked("train", small, **WORKERS)
    assert (done.returncode, done.stdout, done.stderr.count("data.validation")) == (2, "", 1)
    assert "penstock: data.validation: expected a share that leaves a window of 17 tokens to hold out" in done.stderr


def test_a_plain_process_is_timed_in_the_same_run(small):
    small.write_text(SMALL.replace("plain_steps = 0", "plain_steps = 2"))
    told = json.loads(forked("train", small, "--steps", 3, "--json", **WORKERS).stdout)
    assert told["plain"][0]["threads"] == 1
    assert told["plain"][0]["seconds"] > 0


def test_ranks_that_torchrun_launched_are_taken_as_they_are(small):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words += ["penstock.cli", "train", str(small), "--steps", "4", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment())
    assert losses(done) == losses(forked("train", small, "--steps", 4, "--json", "--inline"))


def test_verify_on_workers_and_inline(small):
    for run, flags in ((process, ()), (forked, ("--inline",))):
        done = run("verify", small, "--steps", 2, "--json", *flags)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["ok"]
        assert [stage["stage"] for stage in told["stages"]] == [0, 1]
        assert all(stage["gradient"]["relative"] < 1e-12 for stage in told["stages"])


def test_training_without_a_flush_on_workers_gives_the_losses_of_one_process(small, tmp_path):
    options = "options = {t1 = 4, t3 = 2}"
    small.write_text(SMALL.replace("stages = 2", f'stages = 2\nschedule = "pipemare"\n{options}'))
    page = tmp_path / "run.html"
    workers = forked("train", small, "--json", "--report", page, **WORKERS)
    assert losses(workers) == losses(forked("train", small, "--json", "--inline"))
    assert len(losses(workers)) == 12
    told = json.loads(workers.stdout)
    assert 0 < told["timeline"]["bubble"] < 1
    assert len(told["memory"]) == 2
    assert "measured" in page.read_text()


def test_verify_refuses_an_asynchronous_schedule_before_it_starts_workers(small):
    small.write_text(SMALL.replace("stages = 2", 'stages = 2\nschedule = "2bw"'))
    done = forked("verify", small)  # it has none to start
    assert (done.returncode, done.stdout, done.stderr.count("penstock: ")) == (2, "", 1)
    assert "expected a synchronous schedule to verify" in done.stderr
    assert "but got '2bw'" in done.stderr


def test_verify_leaves_with_1_for_a_model_that_a_pipeline_breaks():
    for flags in ((), ("--inline",)):
        done = forked("verify", ROOT / "tests" / "app" / "run" / "broken.toml", "--steps", 2, *flags, **WORKERS)
        assert done.returncode == 1, done.stderr
        assert "does NOT train as one plain process" in done.stdout
        assert "Traceback" not in done.stderr


def test_the_examples_train(tmp_path):
    for name in ("gpt.toml", "own.toml"):
        done = forked("train", ROOT / "examples" / name, "--steps", 2, "--inline", "--json", cwd=tmp_path)
        assert len(losses(done)) == 2
    done = python(ROOT / "examples" / "train_gpt.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "validation"]


def test_the_example_learns_more_than_the_frequencies_of_letters(tmp_path):
    """It once ended where these end: at 3.2 after all its steps."""
    done = forked("train", ROOT / "examples" / "gpt.toml", "--steps", 20, "--inline", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["validation"]
    assert found["loss"] < found["unigram_entropy"] - 0.4


BAD = {
    "a file that is not there": (None, "nowhere.toml: expected a readable TOML file, but got No such file"),
    "no TOML": (("steps = 12", "steps = = 12"), r"small.toml:\d+:\d+: expected TOML"),
    "an unknown key": (("steps = 12", "steps = 12\nstep = 3"), "training.step: .*did you mean steps"),
    "two faults": (("heads = 2\nlayers = 4", "heads = 3\nlayers = 0"), "got 2 of them"),
    "an unknown schedule": (("stages = 2", 'stages = 2\nschedule = "1f2b"'), "pipeline.schedule: .*try 1f1b"),
    "an option of no schedule": (
        ("stages = 2", "stages = 2\noptions = {t4 = 1}"),
        "pipeline.options.t4: .*an option of",
    ),
    "more layers than memory": (
        ("layers = 4", "layers = 1000000000"),
        "model: expected sizes whose weights the .* GiB of",
    ),
    "a width beyond memory": (("width = 16", "width = 1600000"), "model: expected sizes .* lower width or layers"),
    "more stages than layers": (("stages = 2", "stages = 60"), "at most .* stages for this model's layers, but got 60"),
    "a batch smaller than its parts": (("batch = 16", "batch = 3"), "training.batch: expected at least 4 rows"),
    "nothing to hold out": (
        ("[pipeline]", "[data]\nvalidation = 1e-6\n[pipeline]"),
        "data.validation: expected a share that",
    ),
    "a share of more than all": (
        ("[pipeline]", "[data]\nvalidation = 1.5\n[pipeline]"),
        "data.validation: .* below 1, but",
    ),
    "a text that is not there": (("[pipeline]", '[data]\npath = "no.txt"\n[pipeline]'), "data.path: .*No such file"),
    "a module that is not there": (("[pipeline]", "[pipeline]\ncuts = ['block.1']"), "cuts to name submodules"),
    "a report that cannot be written": (
        ("steps = 12", 'steps = 12\nreport = "/proc/nowhere/a.html"'),
        "a report that can be written",
    ),
}


def here(monkeypatch, capsys, *arguments):
    """The command in this process, which has torch already: its code and what it said."""
    from penstock.cli import main

    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr()


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message(small, monkeypatch, capsys, case, command):
    change, said = BAD[case]
    file = small if change else small.parent / "nowhere.toml"
    if change:
        assert change[0] in SMALL
        small.write_text(SMALL.replace(*change))
    if "report" in case and command == "verify":
        return  # it writes none
    code, told = here(monkeypatch, capsys, command, file, "--inline")
    assert (code, told.out) == (2, "")
    assert told.err.startswith("penstock: ")
    assert told.err.count("penstock: ") == 1
    assert re.search(said, told.err), told.err


def test_more_stages_than_layers_are_refused_before_workers_start(small):
    """A hundred workers on two cores were started for it, which took minutes."""
    small.write_text(SMALL.replace("stages = 2", f"stages = {50 * (os.cpu_count() or 1)}"))
    done = forked("train", small, ranks=0)
    assert done.returncode == 2
    assert re.fullmatch(
        r"penstock: expected at most \d+ stages for this model's layers, but got \d+: .*\n", done.stderr
    )


def test_a_refusal_as_a_process_has_no_traceback(small):
    done = process("train", small.parent / "nowhere.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_a_text_that_is_not_there_is_said_once_by_workers(small):
    small.write_text(SMALL.replace("[pipeline]", '[data]\npath = "no.txt"\n[pipeline]'))
    done = forked("verify", small, **WORKERS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("data.path: expected a file") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_what_workers_refuse_is_said_once(small):
    small.write_text(SMALL.replace("[pipeline]", "[pipeline]\ncuts = ['block.1']"))
    done = forked("train", small, **WORKERS)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stderr.count("cuts to name submodules") == 1, done.stderr


def test_steps_that_are_none_are_refused(small, monkeypatch, capsys):
    code, told = here(monkeypatch, capsys, "train", small, "--steps", 0)
    assert code == 2
    assert "training.steps: expected a whole number of at least 1, but got 0" in told.err


def test_inline_is_for_one_process(small, monkeypatch, capsys):
    from penstock.cli import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["penstock", "train", str(small), "--inline"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "one process for --inline, but got 2 that were launched together" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "verify", "compare", "cluster measure"])
@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        ("0", "x", "expected a whole number in WORLD_SIZE, but got 'x'"),
        ("one", "2", "expected a whole number in RANK, but got 'one'"),
        ("2", "2", "expected RANK from 0 to 1, as WORLD_SIZE is 2, but got 2"),
        ("0", "-2", "expected at least 1 process in WORLD_SIZE, but got -2"),
    ],
)
def test_a_wrong_environment_of_a_rank_gets_one_message(small, monkeypatch, command, rank, size, said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    words = command.split() if command == "cluster measure" else [command, small]
    assert refused(*words).startswith(f"penstock: {said}")


def test_one_step_on_workers_is_a_run_with_an_outcome(small, tmp_path):
    flags = ("--steps", 1, "--json", "--report", tmp_path / "run.html")
    told = json.loads(forked("train", small, *flags, **WORKERS).stdout)
    assert told["losses"] == losses(forked("train", small, *flags, "--inline"))
    assert 0 < told["timeline"]["bubble"] < 1
    assert all(memory > 0 for memory in told["memory"])
    assert "measured" in (tmp_path / "run.html").read_text()


def test_a_resume_with_one_step_left_ends_in_its_outcome(small, tmp_path):
    small.write_text(SMALL + f'checkpoint = "{tmp_path / "kept"}"\n')
    whole = losses(forked("train", small, "--steps", 3, "--json", **WORKERS))
    small.write_text(SMALL + f'checkpoint = "{tmp_path / "other"}"\n')
    losses(forked("train", small, "--steps", 2, "--json", **WORKERS))
    small.write_text(SMALL + f'resume = "{tmp_path / "other" / "step-2"}"\n')
    assert losses(forked("train", small, "--steps", 3, "--json", **WORKERS)) == whole[2:]


WITHOUT_TORCH = """
import sys
from penstock.cli import main
sys.argv[0] = "penstock"
try:
    main()
finally:
    assert "torch" not in sys.modules, "torch takes seconds to load"
"""


def without_torch(*arguments):
    """A command that ends before torch is loaded: its code and what it said."""
    words = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment())
    return done.returncode, done.stderr


def test_the_same_config_again_goes_on_or_is_refused_before_torch_is_loaded(small, tmp_path):
    """It was refused after torch, the workers and the model: 16 seconds."""
    kept = tmp_path / "kept"
    whole = losses(forked("train", small, "--steps", 7, "--json", **WORKERS))
    small.write_text(SMALL + f'checkpoint = "{kept}"\ncheckpoint_every = 1\nkeep = 2\n')
    first = forked("train", small, "--resume", "auto", "--steps", 4, **WORKERS)
    assert "step 1/4 " in first.stdout, "nothing is there yet: from the start"
    assert sorted(folder.name for folder in kept.iterdir()) == ["step-3", "step-4"]
    code, said = without_torch("train", small, "--steps", 4)
    assert code == 2
    assert said.startswith(f"penstock: expected a path where nothing is yet, but got {kept / 'step-3'}, which exists; ")
    assert "go on from there with --resume auto" in said
    code, said = without_torch("train", small, "--steps", 4, "--resume", "auto")
    assert code == 2
    assert f"expected training.steps to be more than the 4 that {kept / 'step-4'} has behind it, but got 4" in said
    again = forked("train", small, "--resume", "auto", "--steps", 6, **WORKERS)
    assert again.returncode == 0, again.stderr
    assert [line.split()[1] for line in again.stdout.splitlines() if line.startswith("step ")] == ["5/6", "6/6"]
    assert "steps 5 to 6, 96 samples since the first" in again.stdout
    assert sorted(folder.name for folder in kept.iterdir()) == ["step-5", "step-6"]
    last = forked("train", small, "--resume", kept / "step-5", "--steps", 7, "--json", **WORKERS)
    assert last.returncode == 2, "step-6 is in its way"
    told = json.loads(forked("train", small, "--resume", "auto", "--steps", 7, "--json", **WORKERS).stdout)
    assert (told["steps"], told["samples"]) == (7, 112)
    assert told["losses"] == whole[6:]


def test_a_path_with_nothing_there_is_refused_before_torch_is_loaded(small, tmp_path):
    """It took until after torch, the workers and the model."""
    code, said = without_torch("train", small, "--resume", tmp_path / "no")
    assert code == 2
    assert said.startswith(f"penstock: {tmp_path / 'no' / 'penstock.json'}: expected a checkpoint, but got nothing the")
    code, said = without_torch("import", small, tmp_path / "no.safetensors", tmp_path / "new")
    assert code == 2
    assert said.startswith(f"penstock: {tmp_path / 'no.safetensors'}: expected a safetensors file, or a transformers d")


@pytest.mark.parametrize("line", ["keep = 2", 'resume = "auto"'])
def test_what_is_said_of_checkpoints_needs_a_path_for_them(small, line):
    small.write_text(SMALL + line + "\n")
    assert "training.checkpoint: expected a path to write checkpoints to, but got nothing; add it" in refused(
        "train", small
    )
