"""The way of a new user, from a config to pages, in one go: what a step needs is what an earlier one printed."""

from __future__ import annotations

import json
import re
import shlex
from itertools import islice
from pathlib import Path

import pytest
import torch

import commands
from browsers import CHROMIUM, Page, chromium

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {"vocab": 32, "width": 16, "inner": 32, "layers": 4, "heads": 2}
CONFIG = """
[model]
factory = "llama:make_model"
arguments = {vocab = 32, width = 16, inner = 32, layers = 4, heads = 2}
[data]
factory = "llama:make_batches"
arguments = {rows = 8, length = 8, vocab = 32}
[pipeline]
stages = 2
[optimizer]
lr = 1e-2
[training]
loss = "llama:next_token"
steps = 4
batch = 8
checkpoint = "checkpoints"
keep = 3
resume = "auto"
plain_steps = 0
"""


class Terminal:
    """Runs commands in one folder and remembers what they printed. A word in braces is taken from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}

    def run(self, line: str, ranks: int = 0) -> str:
        line, _, into = line.format(**self.printed).partition(" > ")
        done = commands.forked(*shlex.split(line)[1:], ranks=ranks, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        if into:
            (self.folder / into).write_text(done.stdout)
        return done.stdout + done.stderr

    def read(self, name: str, pattern: str, said: str) -> str:
        """Keep what the pattern's group is, for later lines."""
        found = re.search(pattern, said, re.MULTILINE)
        assert found, said
        self.printed[name] = found[1]
        return found[1]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found on the path")
def test_from_a_first_training_to_pages(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "llama.py").write_text((EXAMPLES / "llama.py").read_text())
    config = tmp_path / "tiny.toml"
    config.write_text(CONFIG)
    terminal = Terminal(tmp_path)
    assert "1f1b" in terminal.run("penstock schedules"), "the environment has penstock"

    said = terminal.run("penstock train tiny.toml --report run.html", ranks=2)
    assert terminal.read("first", r"^last checkpoint (\S+)$", said) == "checkpoints/step-4"
    terminal.read("run", r"^wrote (\S+)$", said)

    config.write_text(CONFIG.replace("stages = 2", "stages = 3").replace("steps = 4", "steps = 6"))
    said = terminal.run("penstock train tiny.toml --resume {first}", ranks=3)
    assert "step 5/6" in said
    assert terminal.read("checkpoint", r"^last checkpoint (\S+)$", said) == "checkpoints/step-6"

    terminal.read("weights", r"^wrote (\S+)$", terminal.run("penstock export {checkpoint} tiny.safetensors"))
    terminal.read("directory", r"^wrote (\S+)$", terminal.run("penstock export {checkpoint} tiny"))
    next_loss = _loss_of_exported(tmp_path, monkeypatch, terminal.printed)

    said = terminal.run("penstock profile tiny.toml -o profile.json --repetitions 1 --busy 1", ranks=1)
    terminal.read("profile", r"^wrote (\S+)$", said)
    said = terminal.run("penstock cluster measure -o cluster.toml --devices 2", ranks=2)
    terminal.read("cluster", r"^wrote (\S+)$", said)
    terminal.run("penstock plan --profile {profile} --cluster {cluster} --batch 8 --replicas 1 --json > plan.json")
    ranks = 1 + max(stage["rank"] for stage in json.loads((tmp_path / "plan.json").read_text())["stages"])
    config.write_text(config.read_text().replace("steps = 6", "steps = 8"))
    said = terminal.run("penstock train tiny.toml --plan plan.json --report planned.html", ranks=ranks)
    assert "step 7/8" in said
    assert terminal.read("loss", r"^loss (\S+) at first", said) == f"{next_loss:.4f}", "the exported weights' own"
    terminal.read("planned", r"^wrote (\S+)$", said)

    comparison = "penstock compare tiny.toml --stages 2 --methods plain,1f1b,pipedream --steps 4 --html compare.html"
    said = terminal.run(comparison, ranks=5)
    terminal.read("compared", r"^wrote (\S+)$", said)
    assert re.findall(r"^(plain|1f1b|pipedream) ", said, re.MULTILINE) == ["plain", "1f1b", "pipedream"]

    with chromium() as browser:
        for name, slots in (("run", 2), ("planned", ranks)):
            _look_at_timeline(Page(browser, tmp_path / terminal.printed[name]), slots)
        _look_at_comparison(Page(browser, tmp_path / terminal.printed["compared"]))


def _loss_of_exported(folder: Path, monkeypatch: pytest.MonkeyPatch, printed: dict[str, str]) -> float:
    """That of the seventh batch: in plain torch from the file, and in transformers from the directory."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(folder)
    from llama import make_batches, make_model, next_token

    plain = make_model(**SIZES)
    plain.load_state_dict(load_file(folder / printed["weights"]), strict=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder / printed["directory"])
    (batch,) = islice(make_batches(8, 8, 32), 6, 7)
    with torch.no_grad():
        losses = [next_token(model(batch[0]), batch[1]).item() for model in (plain, theirs)]
    assert losses[0] == losses[1]
    return losses[0]


def _look_at_timeline(page: Page, slots: int) -> None:
    """It is drawn, tells its first action, and zooms."""
    assert page.get("rows()") == slots
    assert page.get("drawn.boxes") > 0
    before = page.get("view")
    page.tab.locator("#canvas").focus()
    page.tab.keyboard.press(".")
    page.settle()
    assert page.get("hovered.word") == "0F0"
    page.tab.locator("#canvas").hover()
    page.wheel(-400, "Control")
    assert page.get("view") != before
    page.close()


def _look_at_comparison(page: Page) -> None:
    rows = page.tab.locator("tbody tr, tr").all_inner_texts()
    assert any(row.startswith("pipedream") for row in rows)
    assert page.tab.locator("svg polyline, svg path").count() >= 3
    page.close()
