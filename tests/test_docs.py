"""What README and docs say is run: Python blocks, commands, sample files, and the files they point at.

README's other lines for several processes are run in `tests/distributed/test_torchrun.py`, its figures of the simulator
compared in `tests/test_benchmarks_simulator.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

import commands
from penstock import check, from_csv
from ranks import Run, launched

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAMPLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def blocks(language):
    return [
        pytest.param(body, id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
        for found, body in [match.groups()]
        if found == language
    ]


def named_commands():
    found = {
        command
        for page in PAGES
        for command in re.findall(
            r"^\.venv/bin/(penstock .*)$|`(penstock [a-z]+ [^`]*)`", page.read_text(), re.MULTILINE
        )
    }
    return sorted({one or other for one, other in found})


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    block = tmp_path / "block.py"
    block.write_text(code)
    done = commands.python(block, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def sizes(code):
    """The processes that a script can be launched as."""
    replicas = re.search(r"replicas=\[([\d, ]+)\]", code)
    if replicas is not None and "pipe.train(" in code:
        return {sum(map(int, replicas[1].split(",")))}
    return {int(size) for size in re.findall(r"stages=(\d+)", code) if "pipe.train(" in code}


@pytest.mark.parametrize("code", [block for block in blocks("python") if len(sizes(block.values[0])) == 1])
def test_scripts_that_train_one_pipeline_run_on_workers_too(code, tmp_path):
    """README's script once made data of its own on each rank, which workers refuse."""
    block = tmp_path / "block.py"
    block.write_text(code)
    with launched(tmp_path, *sizes(code), script=str(block)) as run:
        assert run.wait() == 0, run.said
    assert run.out.read_text() != ""


@pytest.mark.parametrize("command", named_commands())
def test_commands_run(command, tmp_path):
    (tmp_path / "mine.csv").write_text(SAMPLE)
    done = commands.forked(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def readme_commands():
    """Every line of README's blocks that is a command, without its comment."""
    lines = [line for block in blocks("") if "README" in block.id for line in block.values[0].splitlines()]
    commands_of_lines = [line.partition("  #")[0].strip() for line in lines]
    return [line for line in commands_of_lines if re.match(r"(\.venv/bin/)?(make|penstock|python|torchrun) ", line)]


def test_every_command_of_the_readme_is_run_by_a_test():
    """As `test_commands_run` does, or the tests of make and of the plan below; `make test` is what runs this."""
    own = [line.removeprefix(".venv/bin/") for line in readme_commands() if line.startswith(".venv/bin/")]
    assert own
    assert set(own) <= set(named_commands())
    others = [line for line in readme_commands() if not line.startswith(".venv/bin/")]
    assert [" ".join(line.split()[:2]) for line in others] == [
        "make train",
        "make test",
        "penstock estimate",
        "penstock plan",
        "penstock train",
    ]


@pytest.mark.slow
def test_make_train_shows_what_was_learned(tmp_path):
    """README's first command on an installation that is there; the training shortened from 280 steps."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    example = (ROOT / "examples" / "gpt.toml").read_text()
    assert example.count("280") == 2
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "gpt.toml").write_text(example.replace("280", "20"))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv" / ".minimal").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    run = Run(["make", "-C", str(tmp_path), "--no-print-directory", "train"], environment, tmp_path / "said")
    try:
        assert run.wait(500) == 0, run.said
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.end()
    out = run.out.read_text()
    assert out.splitlines()[0] == ".venv/bin/penstock train examples/gpt.toml --report gpt.html"
    said = out.split("\nloss ")[-1]
    told = r"^validation loss (\S+) on held-out text, whose unigram entropy is (\S+)$"
    loss, entropy = re.search(told, said, re.MULTILINE).groups()
    assert float(loss) < float(entropy) - 0.4
    _, _, sample = said.partition("\na sample of what the model writes:\n")
    assert len(sample.rpartition("\nwrote gpt.html")[0]) == 300
    page = (tmp_path / "gpt.html").read_text()
    assert f"validation loss {loss} on held-out text, whose unigram entropy is {entropy}" in page


def test_make_train_installs_what_penstock_itself_needs(tmp_path):
    """It once installed a browser's driver and transformers, which the tests need."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(["make", "--dry-run", "train"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if " install " in line]
    assert "[dev]" not in done.stdout
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not {"playwright", "transformers", "pytest"} & {re.split(r"\W", need)[0] for need in needs}


def targets():
    return sorted({name for page in PAGES for name in re.findall(r"(?:`|^)make (\w+)", page.read_text(), re.M)})


@pytest.mark.parametrize("target", targets())
def test_targets_of_make_are_there(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", [block for block in blocks("") if re.search(r"^0F0,", block.values[0], re.MULTILINE)])
def test_sample_schedules_are_sound(body):
    assert check(from_csv(body)).ok


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert all((page.parent / link).exists() for link in links), links
    for path in re.findall(r"`((?:tests|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\((\w+\.md)\)", index))


def test_the_plan_of_the_readme_can_be_trained(tmp_path):
    """Its commands as they stand, one after the other; the training shortened. It was a plan that nothing could run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (block,) = [body for body in blocks("") if "penstock plan " in body.values[0] and "README" in body.id]
    *lines, train = block.values[0].strip().splitlines()
    for line in lines:
        words, _, file = line.partition(" > ")
        done = commands.forked(*shlex.split(words)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if file:
            (tmp_path / file).write_text(done.stdout)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["trainable"]
    done = commands.forked(*shlex.split(train)[1:], "--steps", 3, "--json", cwd=tmp_path, ranks=len(plan["stages"]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["losses"]) == 3
    assert len(found["memory"]) == len(plan["stages"]), "one process a stage"
