"""Seven billion parameters, none of them allocated, and what they would cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Profile, plan, read_cluster, read_profile

pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "llama_7b.toml"
MEASURED = """
import resource, sys
import torch, transformers.models.llama.modeling_llama
import penstock.app.profile.estimate

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = most()
from penstock.cli import main
sys.argv = ["penstock", "estimate", *sys.argv[1:]]
try:
    main()
finally:
    print(most() - before, file=sys.stderr)
"""


def environment():
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths}


@pytest.mark.slow
def test_a_llama_of_seven_billion_parameters(tmp_path):
    words = [sys.executable, "-c", MEASURED, str(EXAMPLE), "--device", "h100", "-o", str(tmp_path / "p.json"), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    count = 32 * block + 2 * 32000 * 4096 + 4096
    assert told["parameters"] == count == 6_738_415_616
    by_name = {layer["name"]: layer for layer in told["layers"]}
    assert by_name["model.layers.31"]["parameter_bytes"] == 4 * block
    assert sum(layer["parameter_bytes"] for layer in told["layers"]) == 4 * count
    assert sum(layer["optimizer_bytes"] for layer in told["layers"]) == 8 * count + 4 * (32 * 9 + 3)
    # Of 2,048 tokens every matrix thrice; causal attention, half of two products forward and of five backward.
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    attention = 32 * (2 + 5) * 2048 * 2048 * 4096
    assert told["flops"] == 6 * 2048 * matrices + attention
    assert by_name["model.layers.0"]["output_bytes"] == 4 * 2048 * 4096
    assert 0 < told["tflops"] < 989.4
    assert float(done.stderr.splitlines()[-1]) < 1.5e9  # bytes; the weights alone would be 27e9

    found = read_profile(tmp_path / "p.json")
    assert found == Profile.from_json(told)
    assert found.device == "h100 (estimated)"
    planned = plan(found, read_cluster("dgx-h100"), method="balance")
    assert planned.plan.stages[-1].last == len(found.layers) - 1
