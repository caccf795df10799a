"""torchrun as docs/workers.md says it: on two hosts that are made of network namespaces, and on loopback alone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from distributed.hosts import can_make_hosts, two_hosts
from ranks import env

ROOT = Path(__file__).parent.parent.parent
SOURCES = str(Path(penstock.__file__).parent.parent)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

LISTENS = """
import os
import sys
from pathlib import Path
from penstock.comm.world.world import join

def listening(pid):
    held = {os.path.realpath(entry).split("/")[-1] for entry in Path(f"/proc/{pid}/fd").iterdir()}
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in held]

world = join()
world.barrier()
if world.rank == 0:
    Path(sys.argv[1]).write_text(" ".join(listening(os.getpid()) + listening(os.getppid())))
world.barrier()
"""


def documented(mark: str) -> str:
    """The command of the page that has some words in it."""
    text = (ROOT / "docs" / "workers.md").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "torchrun " in line and mark in line]
    return line


def readme_script() -> str:
    (script,) = re.findall(r"^```python\n(import torch\n.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return script


@pytest.mark.slow
def test_the_readmes_script_on_four_ranks_of_torchrun(tmp_path):
    """As it stands there, and with the words that README names."""
    (tmp_path / "script.py").write_text(readme_script())
    (line,) = re.findall(r"`(torchrun [^`]*)` on four", (ROOT / "README.md").read_text())
    done = subprocess.run(
        [*TORCHRUN, *shlex.split(line)[1:], "script.py"],
        env=env(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"\d\.\d{8}", done.stdout)  # ranks that print at once mix their words
    counts = sorted(losses.count(loss) for loss in set(losses))
    assert counts == [4, 4, 4], "three steps, each with the same loss on every rank"


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="needs root, to make network namespaces")
def test_the_lines_for_two_hosts_train_on_two_hosts(tmp_path):
    """The README's script, four ranks. The line named no rendezvous backend once, and each host waited for itself."""
    (tmp_path / "script.py").write_text(readme_script())
    with two_hosts() as (a, b):
        lines = [documented(f"--node-rank {number}") for number in range(2)]
        lines = [line.replace("HOST", a.address).replace("PORT", "29400") for line in lines]
        started = [
            subprocess.Popen(
                [*host.prefix, *TORCHRUN, *shlex.split(line)[1:]],
                env=env(PYTHONPATH=SOURCES, **host.environment),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, line in zip((a, b), lines, strict=True)
        ]
        try:
            ended = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    losses = [loss for out, _ in ended for loss in re.findall(r"\d\.\d{8}", out)]  # ranks may mix their words
    counts = sorted(losses.count(loss) for loss in set(losses))
    assert counts == [4, 4, 4], "three steps, each with the same loss on every rank"


def test_the_line_for_loopback_listens_nowhere_else(tmp_path):
    script, found = tmp_path / "script.py", tmp_path / "found"
    script.write_text(LISTENS)
    line = documented("--local-addr").replace("/tmp/rendezvous-RUN", str(tmp_path / "rendezvous"))
    setting, _, *words = shlex.split(line)
    name, _, value = setting.partition("=")
    done = subprocess.run(
        [*TORCHRUN, *words, str(found)],
        env=env(**{name: value}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    addresses = found.read_text().split()
    assert addresses
    assert set(addresses) == {"0100007F"}, "127.0.0.1, as the kernel writes it"
