"""The same training by each method: equal data and budget, figures that add up, and reasons where there are none."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock.app.compare.command import CompareOptions, compare
from penstock.app.compare.memory import KINDS, micro_batch_bytes, stage_bytes
from penstock.app.compare.methods import NAMED, choose_methods
from penstock.app.compare.result import HEADS, Comparison, Row
from penstock.app.compare.setup import Setup
from penstock.app.compare.stopwatch import Stopwatch
from penstock.app.compare.times import finish_times, pace, simulated, steady_range, utilisation
from penstock.app.compare.track import Track, follow_lines
from penstock.app.config.file import read_config
from penstock.app.run.progress import progress_of_many
from penstock.app.run.request import Request
from penstock.core.action import Op
from penstock.core.cost import flat_costs
from penstock.errors import InputError
from penstock.simulator.simulate import simulate_costs

pytestmark = pytest.mark.cpu_only

SMALL = """
[model]
kind = "gpt"
width = 16
heads = 2
layers = 4
length = 8
[pipeline]
stages = 4
microbatches = 4
[optimizer]
lr = 1e-2
[training]
steps = 12
batch = 8
plain_steps = 0
"""


@pytest.fixture
def small(tmp_path):
    def written(*changes):
        text = SMALL
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "small.toml"
        file.write_text(text)
        return str(file)

    return written


def by_name(found):
    return {row.method.name: row for row in found.rows}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """All usual methods, inline: trained once for several tests."""
    file = tmp_path_factory.mktemp("compare") / "small.toml"
    file.write_text(SMALL)
    return compare(Request(str(file)), CompareOptions(inline=True))


def test_every_usual_method_trains_the_same_samples(usual):
    assert [row.method.name for row in usual.rows] == [method.name for method in NAMED.values() if method.usual]
    for row in usual.rows:
        assert row.note is None, row
        assert len(row.losses) == len(row.seconds) == 12
        assert all(map(math.isfinite, row.losses))
        assert row.seconds == sorted(row.seconds)
    assert usual.to_json()["samples"] == 96


def test_synchronous_methods_have_the_losses_of_one_process(usual):
    rows = by_name(usual)
    for name in ("naive", "gpipe", "1f1b", "dapple"):
        assert rows[name].losses == pytest.approx(rows["plain"].losses, rel=1e-5)
    for name in ("pipedream", "2bw", "pipemare", "pipemare-none"):
        assert rows[name].losses[0] == pytest.approx(rows["plain"].losses[0], rel=1e-5)
        assert rows[name].losses[-1] != pytest.approx(rows["plain"].losses[-1], rel=1e-5), "its weights are stale"


def test_remedies_and_the_optimizer_are_those_of_the_method(usual):
    losses = {name: row.losses for name, row in by_name(usual).items()}
    assert losses["pipemare"] != losses["pipemare-none"]
    assert losses["nesterov"] != losses["pipedream"]
    assert losses["pipemare-t1-t2-t3"] != losses["pipemare-t1-t2"]


def test_without_a_flush_stages_are_busier_and_a_pipe_beats_none(usual):
    rows = by_name(usual)
    assert rows["naive"].utilisation < rows["gpipe"].utilisation < rows["pipedream"].utilisation
    assert rows["naive"].pace > rows["1f1b"].pace > rows["2bw"].pace
    assert rows["1f1b"].pace == pytest.approx(rows["dapple"].pace), "the same schedule, from the same stage times"
    assert rows["1f1b"].seconds[-1] == pytest.approx(12 * rows["1f1b"].pace)


def test_memory_by_kind_is_as_the_methods_promise(usual):
    rows = by_name(usual)
    kinds = {name: row.memory for name, row in rows.items()}
    assert all(tuple(found) == KINDS for found in kinds.values())
    for name in ("plain", "naive", "gpipe", "1f1b", "dapple"):
        assert kinds[name]["versions"] == 0
    # The fullest rank is not the same for all: without a pipe it is the last one, which has the largest weights.
    assert 2 * kinds["naive"]["activations"] < kinds["1f1b"]["activations"] <= kinds["gpipe"]["activations"]
    assert kinds["plain"]["weights"] > kinds["1f1b"]["weights"]
    assert kinds["plain"]["optimizer"] == pytest.approx(2 * kinds["plain"]["weights"], rel=0.01), "AdamW's two means"
    assert kinds["2bw"]["versions"] == pytest.approx(kinds["2bw"]["weights"], rel=0.05), "one older version"
    assert kinds["pipemare"]["versions"] == pytest.approx(2 * kinds["pipemare"]["weights"], rel=0.05), (
        "the running mean, and the corrected weights"
    )
    assert kinds["pipemare-none"]["versions"] < 0.2 * kinds["pipemare-none"]["weights"], "a tied weight's copy at most"


def test_the_table_and_the_page_say_which_times_they_are(usual):
    assert "simulated from stage times measured inline" in usual.how
    assert len(usual.table().columns) == len(HEADS)
    assert all(len(usual.cells(row)) == len(HEADS) for row in usual.rows)
    page = usual.html()
    assert page.count("<tr>") == 1 + len(usual.rows)
    assert "time, simulated" in page
    told = json.loads(json.dumps(usual.to_json()))
    first = told["methods"][0]
    assert (first["name"], first["schedule"], first["note"]) == ("plain", None, None)
    assert set(first["memory"]) == set(KINDS)
    assert len(first["losses"]) == len(first["seconds"]) == 12


def test_methods_that_cannot_run_or_diverge_get_a_row_with_the_reason(small):
    file = small(("microbatches = 4", "microbatches = 2"), ("lr = 1e-2", 'name = "SGD"\nlr = 1e30'))
    wish = CompareOptions(["plain", "1f1b", "2bw", "pipedream", "zb-v"], inline=True)
    found = compare(Request(file, {"training.steps": 4}), wish)
    rows = by_name(found)
    for name in ("plain", "1f1b", "pipedream", "zb-v"):
        assert rows[name].note.startswith("diverged after "), rows[name].note
        assert found.cells(rows[name])[-2] == "diverged"
    assert rows["2bw"].note == "expected 2bw's microbatches to be at least its depth of 4 stages, but got 2"
    assert found.cells(rows["2bw"])[-2] == "not run"
    assert "2bw: expected 2bw's microbatches" in "\n".join(found.captions())
    assert found.svg()
    assert json.loads(json.dumps(found.to_json()))["methods"][2]["final_loss"] is None


def test_a_model_that_a_method_cannot_train_does_not_stop_the_others(small, monkeypatch):
    import penstock.app.compare.runs as runs

    def broken(pipe, task, track):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runs, "train", broken)
    rows = by_name(compare(Request(small(), {"training.steps": 2}), CompareOptions(["plain", "1f1b"], inline=True)))
    assert rows["plain"].note is None
    assert rows["1f1b"].note.startswith("RuntimeError: out of luck, at ")
    assert rows["1f1b"].note.endswith("in broken")
    assert rows["1f1b"].cause.failed


@pytest.mark.parametrize(("stages", "replicas"), [(2, [3, 1]), (2, [1, 2]), (1, [4])])
def test_replicas_are_simulated_and_counted_each(small, stages, replicas):
    """Each has all weights of its stage, and its share of a micro-batch's seconds and activations."""
    changes = [("stages = 4", f"stages = {stages}"), ("steps = 12", "steps = 6")]
    whole = by_name(compare(Request(small(*changes)), CompareOptions(["1f1b"], inline=True)))["1f1b"]
    divided = small(changes[0], ("microbatches", f"replicas = {replicas}\nmicrobatches"), changes[1])
    found = compare(Request(divided), CompareOptions(["plain", "1f1b", "pipedream"], inline=True))
    rows = by_name(found)
    assert f"of {':'.join(map(str, replicas))} replicas, mini-batches of 8" in found.title
    assert found.to_json()["replicas"] == replicas
    assert rows["1f1b"].losses == pytest.approx(rows["plain"].losses, rel=1e-5) == whole.losses
    for kind in ("weights", "gradients", "optimizer"):
        assert rows["1f1b"].memory[kind] <= whole.memory[kind]
    if stages == 1:
        assert rows["1f1b"].memory["activations"] == pytest.approx(whole.memory["activations"] / 4)
    if stages > 1:  # tied weights, which no replica can own alone when it updates in its own turn
        assert "weights of stages with replicas that one stage uses alone under pipedream" in rows["pipedream"].note


def test_the_configs_own_schedule_is_compared_with_its_options(small):
    file = small(("stages = 4", 'stages = 2\nschedule = "zb-h1"'))
    setup = Setup(Request(file), read_config(file))
    assert setup.usual()[-1] == "zb-h1"
    own = small(("stages = 4", "stages = 2\nschedule = 'dapple'\noptions = {policy = 'pb'}"))
    setup = Setup(Request(own), read_config(own))
    assert setup.usual().count("dapple") == 1
    dapple, gpipe, t1 = (setup.request(method) for method in choose_methods(["dapple", "gpipe", "pipemare-t1"], 12))
    assert dapple.changes["pipeline.options"] == {"policy": "pb"}
    assert gpipe.changes["pipeline.options"] == {}
    assert t1.changes["pipeline.options"] == {"t1": 3, "t2": False}


def test_nesterov_takes_rate_decay_and_scheduler_of_the_configs_optimizer(small):
    file = small(("lr = 1e-2", 'lr = 1e-2\nbetas = [0.8, 0.9]\n[optimizer.scheduler]\nname = "StepLR"\nstep_size = 3'))
    setup = Setup(Request(file), read_config(file))
    (method,) = choose_methods(["nesterov"], 12)
    found = setup.request(method).task().config.optimizer
    assert (found.name, found.arguments) == ("nesterov", {"lr": 1e-2, "weight_decay": 1e-2}), "AdamW's own decay"
    assert found.scheduler.name == "StepLR"


def test_k_and_n_come_from_the_budget_or_from_the_user():
    every = "pipemare-t1-t2-t3"
    assert choose_methods([every], 40)[0].options == {"t1": 10, "t2": True, "t3": 4}
    assert choose_methods([every], 2)[0].options == {"t1": 1, "t2": True, "t3": 1}
    (method,) = choose_methods([every], 40, t1=7, t3=3)
    assert method.options == {"t1": 7, "t2": True, "t3": 3}
    assert (method.flushed, method.asynchronous, NAMED["gpipe"].asynchronous) == (3, True, False)
    assert [method.name for method in choose_methods(["2bw", "plain", "2bw"], 4)] == ["2bw", "plain"]


@pytest.mark.parametrize(
    ("wish", "changes", "said"),
    [
        (CompareOptions(["1f1b", "pipedreem"]), (), "'pipedreem'; try pipedream"),
        (CompareOptions([]), (), "the names of some methods"),
        (CompareOptions(t1=0), (), "--t1 to be at least 1"),
        (CompareOptions(t3=-1), (), "--t3 to be at least 1"),
        (CompareOptions(), (("lr = 1e-2", ""),), "optimizer.lr: expected the learning rate that all methods share"),
        (CompareOptions(), (("stages = 4", "stages = 60"),), "at most .* stages for this model's layers, but got 60"),
        (CompareOptions(), (("lr = 1e-2", "lr = -1.0"),), "a value that AdamW takes"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(small, wish, changes, said):
    with pytest.raises(InputError, match=said):
        compare(Request(small(*changes)), wish)


def test_compare_starts_its_own_workers(small, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="which starts its own workers, but got 2 that were launched together"):
        compare(Request(small()), CompareOptions())


def test_what_is_weighed_is_what_the_stages_of_a_worker_would_keep(small):
    """A linear layer keeps its input for the backward; what it made is handed on and counted with it."""
    task = Request(small()).task()
    kept = micro_batch_bytes(task)
    assert len(kept) == 4
    one = micro_batch_bytes(Request(small(), {"pipeline.stages": 1}).task())
    assert one[0].activations == pytest.approx(sum(stage.activations for stage in kept), rel=0.3)
    rows, length, width = 2, 8, 16
    assert all(stage.inputs >= rows * length * width * 4 for stage in kept[1:])


def test_versions_are_counted_as_the_buffers_that_are_there(small):
    def versions(schedule, **options):
        changes = {"pipeline.schedule": schedule, "pipeline.microbatches": 1, "pipeline.options": options}
        task = Request(small(), changes).task()
        pipe = task.pipeline(verify=False)
        for _ in pipe.train(task.batches(0, 10)):
            pass
        found = stage_bytes(pipe)
        return [found[at]["versions"] / found[at]["gradients"] for at in (1, 2)]

    assert versions("pipedream") == [2.0, 1.0], "as many as forwards ahead, on stages 1 and 2 of 4"
    assert versions("pipedream", vertical_sync=True) == [3.0, 3.0]
    assert versions("pipemare") == [2.0, 2.0]
    assert versions("pipemare", t2=False) == [0.0, 0.0]


def test_a_stopwatch_times_every_operation_once(small):
    changes = {"pipeline.schedule": "pipedream", "training.steps": 5}
    for schedule, around in (("pipedream", 2 * 4 * 4 * 5), ("1f1b", 0)):
        task = Request(small(), changes | {"pipeline.schedule": schedule}).task()
        pipe = task.pipeline(verify=False)
        watch = Stopwatch(pipe)
        for _ in pipe.train(task.batches(0, 5)):
            pass
        for stage in range(4):
            assert len(watch.own[Op.F, stage]) == len(watch.own[Op.B, stage]) == 4 * 5
            assert len(watch.own[Op.UPDATE, stage]) == 5
        assert sum(map(len, watch.overhead.values())) == around
        assert all(second >= 0 for seconds in (*watch.own.values(), *watch.overhead.values()) for second in seconds)


def test_updates_inside_a_forward_are_no_part_of_it(small):
    """2bw with clipping: an update waits for the agreement and happens when a forward first needs it."""
    task = Request(small(), {"pipeline.schedule": "2bw", "pipeline.clip": 1.0}).task()
    pipe = task.pipeline(verify=False)
    watch = Stopwatch(pipe)
    for optimizer in pipe.optimizers.optimizers.values():
        optimizer.register_step_pre_hook(lambda *_: time.sleep(0.1))
    for _ in pipe.train(task.batches(0, 6)):
        pass
    assert len(watch.own[Op.UPDATE, 0]) == 6
    assert min(watch.own[Op.UPDATE, 0]) >= 0.1
    first = watch.overhead[Op.F, 0][::4]  # of each mini-batch: there it happens
    assert min(first[2:]) < 0.1


def test_simulated_times_are_those_of_the_schedule():
    costs = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
    built = penstock.schedule("1f1b", stages=4, microbatches=8)
    done, busy = simulated(built, flat_costs(built.shape, **costs), 5, 0)
    line = penstock.simulate(built, **costs)
    assert done == pytest.approx([line.makespan * step for step in range(1, 6)])
    assert busy == line.utilisation
    loop = penstock.loop("pipedream", stages=4, microbatches=8)
    done, busy = simulated(loop, flat_costs(loop.shape, **costs), 30, 0)
    assert np.diff(done)[5:-5] == pytest.approx(24.0), "eight times F + B, and no bubble"
    assert busy == pytest.approx(1.0)
    assert pace(done, 4) == pytest.approx(24.0)
    mixed, _ = simulated(loop, flat_costs(loop.shape, **costs), 30, 10)
    alone = simulate_costs(loop.unroll(1), flat_costs(loop.shape, **costs)).makespan
    assert mixed[:10] == pytest.approx([alone * step for step in range(1, 11)])
    assert pace(mixed, 4, 10) == pytest.approx(24.0), "mini-batches that were flushed are left out"
    assert simulated(loop, flat_costs(loop.shape, **costs), 3, 5)[0] == pytest.approx([alone, 2 * alone, 3 * alone])


def test_a_mini_batch_is_finished_when_its_last_update_is():
    loop = penstock.loop("2bw", stages=2, microbatches=2)
    line = simulate_costs(loop.unroll(4), flat_costs(loop.shape, update=1.0))
    done = finish_times(line)
    assert len(done) == 4
    assert (np.diff(done) > 0).all()
    assert done[-1] == line.makespan
    assert 0.5 < utilisation(line) <= 1.0


@pytest.mark.parametrize(
    ("count", "stages", "flushed", "window"),
    [(40, 4, 0, (4, 35)), (40, 4, 10, (14, 35)), (5, 4, 0, (0, 4)), (3, 2, 9, (1, 2)), (2, 2, 0, (0, 1))],
)
def test_the_steady_part_leaves_out_fill_and_drain(count, stages, flushed, window):
    assert steady_range(count, stages, flushed) == window


def test_a_single_mini_batch_has_a_pace():
    assert pace([0.7], 4) == 0.7


def test_notes_of_another_process_are_followed_to_the_last(tmp_path):
    shown, track = [], Track(lambda done, loss: shown.append((done, loss)))
    notes = tmp_path / "notes"

    def take(line):
        _, loss, seconds = line.split()
        track.add(float(loss), float(seconds))

    with follow_lines(notes, take), notes.open("a") as out:
        writer = Track(out=out, number=3)
        writer.begin()
        for loss in (3.0, 2.0, 1.0):
            writer.record(loss)
    assert track.losses == writer.losses == [3.0, 2.0, 1.0]
    assert track.seconds == pytest.approx(writer.seconds)
    assert shown == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert notes.read_text().startswith("3 3.0 ")


def test_progress_is_one_bar_on_a_terminal_and_a_line_a_method_elsewhere():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with progress_of_many(2, 3, out) as show:
        show("1f1b", 0, 3, 2.0)
        show("2bw", 3, 2, 1.5)
    assert "5/6" in out.getvalue()
    assert "loss 1.5000" in out.getvalue()
    plain = io.StringIO()
    with progress_of_many(2, 3, plain) as show:
        for done in (1, 2, 3):
            show("1f1b", 0, done, 1.0 / done)
    assert plain.getvalue() == "1f1b: 3 mini-batches, loss 0.3333\n"
    with progress_of_many(1, 1, None) as show:
        show("1f1b", 0, 1, 1.0)


def test_a_loss_out_of_all_bounds_stays_short():
    row = Row(NAMED["1f1b"], [1e20, 1e20], [1.0, 2.0], 1.0, None, dict.fromkeys(KINDS, 0.0))
    cells = Comparison([row], "measured", "times measured", 2, 1, 8, 2).cells(row)
    assert cells == ["1f1b", "8", "-", "0", "0", "0", "0", "0", "0", "1e+20", "2 s"]


def test_nesterov_makes_nadam_with_decoupled_decay():
    weight = torch.nn.Parameter(torch.ones(3))
    made = penstock.nesterov(3e-4, weight_decay=0.1)([weight])
    assert isinstance(made, torch.optim.NAdam)
    assert made.defaults["betas"] == (0.99, 0.999)
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (3e-4, 0.1)
    assert made.defaults["decoupled_weight_decay"] is True
    own = penstock.nesterov(1e-3, betas=(0.9, 0.99), momentum_decay=0.01)([weight])
    assert (own.defaults["betas"], own.defaults["momentum_decay"]) == ((0.9, 0.99), 0.01)


def test_examples_can_be_compared():
    for file in sorted((Path(__file__).parents[3] / "examples").glob("*.toml")):
        setup = Setup(Request(str(file)), read_config(file))
        for method in choose_methods(None, setup.steps):
            if method.schedule is not None and method.schedule != "2bw":
                read_config(file, setup.request(method).changes)
