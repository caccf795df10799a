"""Stages with replicas on ranks: the bits of one process, checkpoints of any layout, failures, bad input."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import replica_bits
import torch
from test_checkpoints import workers
from timeline_rank import BACKWARD, FORWARD

import penstock
from checkpoints import conv, differences, gpt, pictures, state, steps
from penstock.core.action import Op
from penstock.core.match import match
from penstock.core.timeline import Timeline
from penstock.reports.html import html
from ranks import all_gone, launched

torch.set_num_threads(1)
SCRIPT = replica_bits.__file__
TRAINS = str(Path(__file__).parent / "train_rank.py")
LIMIT = 5.0  # seconds in which all have to end
BY_SIZE = {
    size: [name for name, (_, replicas, *_) in replica_bits.CASES.items() if sum(replicas) == size]
    for size in (2, 3, 4)
}


@pytest.mark.parametrize("size", BY_SIZE)
def test_ranks_give_the_bits_of_one_process(size, tmp_path):
    modules = ("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")
    with launched(
        tmp_path,
        size,
        "bits",
        str(tmp_path / "out"),
        *BY_SIZE[size],
        script=SCRIPT,
        modules=modules if size == 3 else (),
    ) as run:
        assert run.wait(300) == 0, run.said
    ranks = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(size)]
    for name in BY_SIZE[size]:
        wanted = replica_bits.run(name)
        for found in (rank[name] for rank in ranks):
            assert {key: found[key] for key in found if key != "state"} == {
                key: wanted[key] for key in wanted if key != "state"
            }
            assert [key for key, mark in found["state"].items() if mark != wanted["state"][key]] == []
        assert set().union(*(rank[name]["state"] for rank in ranks)) == wanted["state"].keys()


@pytest.mark.parametrize(("make", "kind", "given"), [(gpt, "gpt", None), (conv, "conv", pictures)])
def test_saved_by_two_and_one_replicas_loaded_by_others_and_by_none(make, kind, given, tmp_path):
    path = tmp_path / "saved"
    done = workers(tmp_path / "out", 3, "step:3", f"save:{path}", "state:then", "step:1", kind=kind, stages=2,
                   replicas=[2, 1])  # fmt: skip
    then, more = done.state("then"), ([given] if given else [])
    for stages, options in (
        (2, {"replicas": [2, 1]}),
        (2, {"replicas": [1, 3]}),
        (1, {}),
        (4, {}),
        (1, {"replicas": [4]}),
    ):
        pipe = make(stages, **options)
        pipe.load(path)
        assert differences(state(pipe), then) == []
        if options.get("replicas") == [2, 1]:
            assert steps(pipe, 1, *more) == done.losses[3:]
    again = tmp_path / "again"
    pipe.save(again)
    other = workers(tmp_path / "other", 3, f"load:{again}", "state:now", "step:1", kind=kind, stages=2, replicas=[1, 2])
    assert differences(other.state("now"), then) == []
    same = make(2, replicas=[1, 2])
    same.load(path)
    assert other.losses == steps(same, 1, *more)


def test_measured_steps_have_the_rows_of_every_replica(tmp_path):
    with launched(tmp_path, 3, "measured", str(tmp_path / "out"), script=SCRIPT) as run:
        assert run.wait(300) == 0, run.said
    ranks = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(3)]
    assert ranks[0] == ranks[1] == ranks[2]
    for schedule, told in ranks[0].items():
        lines = [Timeline.from_json(line) for line in told["measured"]]
        predicted, built = (
            Timeline.from_json(told["predicted"]),
            penstock.schedule(schedule, stages=2, microbatches=4, replicas=[2, 1]),
        )
        assert told["last"] == told["measured"][-1]
        assert len(told["memory"]) == 3
        for line in lines:
            rows, slot = line.schedule.rows, line.schedule.slot_of_rows()
            assert line.schedule.shape.replicas == built.shape.replicas
            assert sorted(set(slot[rows.op == Op.REDUCE].tolist())) == [0, 1]
            for at in range(3):
                forwards = (line.end - line.start)[(rows.op == Op.F) & (slot == at)]
                assert len(forwards) == 4
                assert (forwards >= FORWARD).all()
            pairs = match(line.schedule)
            known = pairs.sends >= 0
            assert (line.end[pairs.receives[known]] > line.start[pairs.sends[known]]).all()
            assert html([("measured", line)]).startswith("<!doctype html>")
        assert not predicted.measured
        assert predicted.memory is not None
        assert predicted.makespan >= 4 * (FORWARD + BACKWARD)  # of the last stage, which sleeps so long


def test_one_killed_replica_ends_all_in_time_and_is_named(tmp_path):
    dice = random.Random(3)
    for attempt, victim in enumerate((0, 1, 2, 1)):
        asked = {"steps": 100_000, "schedule": dice.choice(["1f1b", "zb-h1"]), "stages": 2, "replicas": [2, 1]}
        with launched(tmp_path / str(attempt), 3, json.dumps(asked), script=TRAINS) as run:
            pids = run.begun(3)
            time.sleep(dice.random() * 0.6)
            os.kill(pids[victim], signal.SIGKILL)
            all_gone([*pids.values()], LIMIT)
            assert run.wait() == 128 + signal.SIGKILL
            where = f"stage 0, replica {victim}" if victim < 2 else "stage 1"
            assert re.search(rf"rank \d stops.*: rank {victim} died .*\({where}[,)]", run.said), run.said
            assert re.search(rf"penstock: rank {victim} ended by signal 9 .*\({where}[,)]", run.said), run.said
            assert "Traceback" not in run.said, run.said


def test_an_exception_in_one_replicas_forward_shows_its_traceback_and_the_replica(tmp_path):
    with launched(tmp_path, 3, "odd", str(tmp_path / "out"), "exception", script=SCRIPT) as run:
        pids = run.begun(3)
        assert run.wait() == 1
        all_gone([*pids.values()], LIMIT)
        place = r"0F\d+ \(stage 0, replica 1, micro-batch \d+\)"
        assert re.search(rf"rank 1 failed in {place}: ValueError: no such luck", run.said), run.said
        assert run.said.count("Traceback (most recent") == 1, run.said


REFUSED = {
    "world": r"5 processes for 2 pipeline ranks with 2:3 replicas, but got 3; launch with --nproc-per-node 5",
    "unequal": r"the same (schedule|replicas) on every rank, but got .* on rank 0 and .* on rank 1; run the same",
    "few rows": r"a batch of at least 2 rows, one for each replica, but got 1",
    "counts": r"a positive replica count for each of 2 ranks, but got \[3\]",
    "sparse": r"dense gradients in a stage with replicas.*'0\.weight' in stage 0; make the embedding with sparse=False",
    "data": r"the same batch on every rank",
    "sparse function": r"dense gradients in a stage with replicas.*",
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_message(name, tmp_path):
    with launched(tmp_path, 3, "odd", str(tmp_path / "out"), name, script=SCRIPT) as run:
        pids = run.begun(3)
        assert run.wait() != 0
        all_gone([*pids.values()], LIMIT)
        said = run.said
    told = [path.read_text() for path in sorted(tmp_path.glob("out.[0-9]"))]
    assert any(re.search(REFUSED[name], text) for text in told), (told, said)
    if name not in ("data", "sparse function"):  # which one rank alone can see
        assert len(told) == 3
        assert len(set(told)) == 1
