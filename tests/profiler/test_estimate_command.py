"""`penstock estimate`: a table, JSON that a plan reads, a calibration, and one message for what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock import Profile
from penstock.cli import main
from penstock.profiler.calibration import read_machine

ROOT = Path(__file__).parent.parent.parent
OWN = str(ROOT / "examples" / "own.toml")


@pytest.fixture
def penstock(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["penstock", "estimate", *words])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return run


def test_a_table_and_what_it_adds_up_to(penstock):
    code, out, _ = penstock(OWN, "--device", "a100")
    assert code == 0
    assert "a micro-batch of 8 rows on a100-80 (estimated)" in out
    assert "±" not in out  # nothing was measured
    assert "25,601 parameters; forward and backward" in out
    assert "with gradients and one micro-batch; a100-80 has 80" in out


def test_json_is_the_profile_that_is_written_and_totals(penstock, tmp_path):
    code, out, err = penstock(OWN, "--device", "h100", "--precision", "bf16", "-o", "p.json", "--json")
    assert code == 0
    assert "wrote p.json" in err
    told = json.loads(out)
    assert Profile.from_json(told) == Profile.from_json(json.loads((tmp_path / "p.json").read_text()))
    assert (told["parameters"], told["samples"]) == (25_601, 8)
    middle = 6 * 64 * 64
    assert told["flops"] == 2 * 8 * (2 * 8 * 64 + 3 * (middle + 64))  # the inputs need no gradient
    assert told["tflops"] == pytest.approx(told["flops"] / told["seconds"] / 1e12)
    assert told["seconds"] == pytest.approx(
        sum(a["forward"] + a["input_grad"] + a["weight_grad"] for a in told["layers"])
    )


@pytest.mark.cpu_only
def test_a_calibration_is_written_and_used(penstock, tmp_path):
    code, _, err = penstock("--calibrate", "here.toml")
    assert code == 0
    assert "measuring products in fp32" in err
    machine = read_machine(None, tmp_path / "here.toml")
    code, out, _ = penstock(OWN, "--calibration", "here.toml")
    assert code == 0
    assert f"on {machine.kind} (estimated)" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected a config, or --calibrate, but got neither"),
        ((OWN,), "expected a device to estimate for, but got none"),
        ((OWN, "--device", "h10"), "expected the name of a device, but got 'h10'; did you mean h100"),
        ((OWN, "--device", "h100", "--calibration", "bad.toml"), "bad.toml: bandwith: expected a key of a calibration"),
        ((OWN, "--device", "h100", "--precision", "int8"), "expected precision to be one of fp32, bf16, fp16"),
        (("nowhere.toml", "--device", "h100"), "nowhere.toml: expected a readable TOML file"),
        (("odd.toml", "--device", "h100"), "model: expected a model that can be made without its weights"),
    ],
)
def test_what_is_wrong_gets_one_message(penstock, monkeypatch, tmp_path, words, said):
    (tmp_path / "bad.toml").write_text("bandwith = 1")
    (tmp_path / "odd_model.py").write_text(
        "from torch import nn\ndef make():\n model = nn.Linear(8, 1)\n model.weight.sum().item()\n return model\n"
    )
    text = Path(OWN).read_text().replace("own:make_model", "odd_model:make")
    (tmp_path / "odd.toml").write_text(text.replace("arguments = { width = 64, layers = 6 }", ""))
    monkeypatch.syspath_prepend(Path(OWN).parent)
    code, _, err = penstock(*words)
    assert code == 2
    assert err.startswith(f"penstock: {said}"), err
    assert err.count("\n") == 1
