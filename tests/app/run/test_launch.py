"""The launcher: local workers that end together, with one line on which rank failed and how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import nursery
from penstock.app.run.launcher import launch
from penstock.errors import InputError
from ranks import LOOP, PATIENCE, Run, all_gone, env, launched

PLAIN = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def print(*words, flush=True):  # in one write: ranks share the file, and where output is not buffered a line has two
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
print(f"rank {rank} begins as {os.getpid()}")
"""


def script(folder, text):
    """No torch: the launcher does not ask what its workers are."""
    path = folder / "worker.py"
    path.write_text(PLAIN + text)
    return str(path)


def test_the_environment_of_the_workers(tmp_path):
    names = ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    text = f"print(rank, *[os.environ[name] for name in {names}], repr(sys.stdin.read()), sys.argv[1:])"
    with launched(tmp_path, 2, "a b", script=script(tmp_path, text)) as run:
        assert run.wait() == 0, run.said
        lines = [line for line in run.out.read_text().splitlines() if "begins" not in line]
        assert sorted(lines) == [f"{rank} 2 {rank} 2 127.0.0.1 1 '' ['a b']" for rank in range(2)]


def test_threads_that_the_user_asked_for_stay(tmp_path):
    text = "print(os.environ['OMP_NUM_THREADS'])"
    with launched(tmp_path, 1, script=script(tmp_path, text), OMP_NUM_THREADS=3) as run:
        assert run.wait() == 0
        assert run.out.read_text().splitlines()[-1] == "3"


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        ("sys.exit(7)", 7, "rank 1 ended with code 7"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "rank 1 ended by signal 9 (SIGKILL), possibly out of memory, before it joined the others",
        ),
        ("os.kill(os.getpid(), 11)", 139, "rank 1 ended by signal 11 (SIGSEGV), before it joined the others"),
    ],
)
def test_the_first_failing_rank_is_named_and_the_rest_is_ended(tmp_path, end, code, line):
    text = (
        "from pathlib import Path\nready = [Path(__file__).with_name(f'{other}.ready') for other in (0, 2)]\n"
        "while rank == 1 and not all(file.exists() for file in ready):\n    time.sleep(0.01)\n"
        f"if rank == 1:\n    {end}\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready[rank // 2].touch()\ntime.sleep(100)"
    )
    with launched(tmp_path, 3, script=script(tmp_path, text)) as run:
        pids = run.begun(3)
        all_gone([pids[1]], 5.0)
        all_gone([pids[0], pids[2]], 5.0)  # from the first one's end to that of those who do not listen
        assert run.wait() == code
        assert run.said == f"penstock: {line}\npenstock: still running 4.4 s later, and ended: rank 0, 2\n"


def test_what_a_failed_worker_has_started_ends_too(tmp_path):
    text = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '100'])\nprint('child', child.pid, flush=True)\n"
        "os._exit(3)"
    )
    with launched(tmp_path, 1, script=script(tmp_path, text)) as run:
        assert run.wait() == 3
        all_gone([int(run.out.read_text().split("child ")[1])], 1.0)


LOADS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, at):
        time.sleep(0.01)
        return torch.zeros(4)
for number, batch in enumerate(DataLoader(Slow(), batch_size=2, num_workers=2)):
    if number == 3:
        print("loading")
"""


@pytest.mark.parametrize("victim", [0, None])
def test_processes_that_load_data_leave_no_directories(tmp_path, victim):
    """Theirs for sockets, which they remove when they end by themselves: the launcher ends them before that."""
    # A socket's path has at most 107 characters, which pytest's own folders can take up.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        launched(tmp_path, 2, script=script(tmp_path, LOADS), fork=False, TMPDIR=folder) as run,
    ):
        rest, pids, until = Path(folder), run.begun(2), time.monotonic() + PATIENCE
        while run.out.read_text().count("loading") < 2:
            assert run.process.poll() is None, run.said
            assert time.monotonic() < until, run.said
            time.sleep(0.02)
        assert [folder.name[:5] for folder in rest.iterdir()] == ["pymp-"] * 4
        os.kill(
            run.process.pid if victim is None else pids[victim], signal.SIGTERM if victim is None else signal.SIGKILL
        )
        all_gone([*pids.values()], 5.0)
        run.wait()
        assert list(rest.iterdir()) == []


@pytest.mark.parametrize("seconds", [0.1, 0.6, 1.2, 2.4])
def test_a_launcher_that_is_ended_while_torch_loads_ends_at_once(tmp_path, seconds):
    command = [sys.executable, "-c", nursery.LAUNCH, "2", sys.executable, LOOP, "none", "0", "--rows", "100000"]
    run = Run(command, env(), tmp_path)
    try:
        time.sleep(seconds)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(5.0) in (128 + signal.SIGTERM, -signal.SIGTERM)
        assert run.said == ""
    finally:
        run.end()


def test_a_worker_that_ignores_ctrl_c_is_ended_all_the_same(tmp_path):
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(100)"
    with launched(tmp_path, 2, script=script(tmp_path, text)) as run:
        pids = run.begun(2)
        while run.out.read_text().count("deaf") < 2:
            time.sleep(0.02)
        os.killpg(run.process.pid, signal.SIGINT)
        assert all_gone([*pids.values()], 5.0) > 3.0
        assert run.wait() == 128 + signal.SIGINT


def test_ctrl_c_comes_once_and_can_be_handled(tmp_path):
    text = (
        "try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    print('saving', flush=True)\n"
        "    time.sleep(0.5)\n    print('saved', flush=True)"
    )
    with launched(tmp_path, 2, script=script(tmp_path, text)) as run:
        pids = run.begun(2)
        os.killpg(run.process.pid, signal.SIGINT)
        all_gone([*pids.values()], 5.0)
        assert run.wait() == 128 + signal.SIGINT
        assert run.out.read_text().count("saved") == 2
        assert run.said == ""


def test_ctrl_c_while_workers_load_is_no_traceback(tmp_path):
    (tmp_path / "heavy.py").write_text("import os, time\nos.write(1, b'loading\\n')\ntime.sleep(100)\n")
    text = (
        "import sys\nfrom penstock.app.run.launcher import launch\nfrom penstock.app.run.worker_main import command\n"
        "sys.exit(launch(command('heavy', []), 2))"
    )
    asked, pipe = [sys.executable, "-c", text], subprocess.PIPE
    with subprocess.Popen(asked, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        assert [run.stdout.readline() for _ in range(2)] == ["loading\n"] * 2
        os.killpg(run.pid, signal.SIGINT)
        assert run.communicate(timeout=20) == ("", "")
    assert run.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("module", ["penstock.cli", "penstock.app.run.worker_main"])
def test_ctrl_c_that_an_import_swallows_ends_the_process_all_the_same(tmp_path, module):
    """As parts of torch do: this stands for it."""
    (tmp_path / "torch").mkdir()
    swallow = "try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    time.sleep(100)\n"
    (tmp_path / "torch" / "__init__.py").write_text(f"import time\nprint('loading', flush=True)\n{swallow}")
    file = tmp_path / "some.toml"
    file.write_text("")
    words = ["train" if module == "penstock.cli" else "penstock.app.run.train", str(file)]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked, pipe, env = [sys.executable, "-m", module, *words], subprocess.PIPE, os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(asked, stdout=pipe, stderr=pipe, text=True, env=env) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "loading\n"
            run.send_signal(signal.SIGINT)
            assert run.communicate(timeout=20) == ("", "")
            assert run.returncode == 128 + signal.SIGINT
        finally:
            run.kill()


def test_workers_that_have_not_begun_die_with_the_launcher(tmp_path):
    """Before any code of penstock runs in them. As programs: forked ranks are not what the launcher starts."""
    with launched(tmp_path, 2, script=script(tmp_path, "time.sleep(100)"), fork=False) as run:
        pids = run.begun(2)
        os.kill(run.process.pid, signal.SIGKILL)
        all_gone([*pids.values()], 1.0)


@pytest.mark.parametrize(
    ("command", "workers", "message"),
    [
        ([sys.executable], 0, "expected at least one worker, but got 0"),
        (["no-such-program", "x"], 1, "expected a command that can be run, but got no-such-program x"),
        ([], 1, "expected a command that can be run, but got none"),
        ([sys.executable], 10**7, r"at most \d+ workers, for which this host has memory, but got 10000000"),
    ],
)
def test_bad_input(command, workers, message):
    with pytest.raises(InputError, match=message):
        launch(command, workers)
