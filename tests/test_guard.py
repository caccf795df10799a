"""A few of the guard's cases: two ranks give the bits of one process, and where the record was made, its bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranks import Run, env

HERE = Path(__file__).parent
GUARD, RECORD = HERE / "support" / "guard.py", HERE / "golden" / "guard.json"


def run(folder: Path, *words: object) -> tuple[int, str]:
    """The guard's exit code and what it said."""
    process = Run(
        [str(GUARD), *map(str, words)], env(), folder, fork=True, modules=("transformers.models.llama.modeling_llama",)
    )
    try:
        return process.wait(300), process.out.read_text() + process.said
    finally:
        process.end()


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    code, said = run(folder, "record", folder / "now.json", "--sample")
    assert code == 0, said
    return json.loads((folder / "now.json").read_text())


def test_two_ranks_give_the_bits_of_one_process(sampled):
    by_way = {
        way: {name.removesuffix(f" | {way}"): value for name, value in sampled["cases"].items() if name.endswith(way)}
        for way in ("2 stages", "2 ranks")
    }
    assert len(by_way["2 ranks"]) == 13
    assert by_way["2 stages"] == by_way["2 ranks"]
    assert [name for name, value in by_way["2 ranks"].items() if len(value.split()) != 3 or "refused" in value] == []


def test_the_bits_are_those_of_the_record_on_its_machine(sampled):
    record = json.loads(RECORD.read_text())
    assert sampled["cases"].keys() <= record["cases"].keys()
    if record["machine"] != sampled["machine"]:
        pytest.skip(f"recorded on {record['machine']}")
    assert [name for name, value in sampled["cases"].items() if record["cases"][name] != value] == []


def test_a_run_with_other_bits_is_named_and_a_foreign_record_is_no_difference(sampled, tmp_path):
    name = "1f1b | gpt | clip | 2 stages"
    weights, *others = sampled["cases"][name].split()
    changed = sampled["cases"] | {name: " ".join(["0" * len(weights), *others])}
    for machine, words, code in (
        (sampled["machine"], f"{name}: other weights, compared with the record\n1 differ\n", 1),
        (sampled["machine"] | {"torch": "another"}, "not compared with", 3),
    ):
        (tmp_path / "record.json").write_text(json.dumps({"machine": machine, "cases": changed}))
        found, said = run(tmp_path, "check", tmp_path / "record.json", "--sample", "--only", name)
        assert (found, words in said) == (code, True), said
