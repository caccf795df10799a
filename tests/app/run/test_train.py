"""Training and verifying from a config, in this process: losses fall, the table says what it must, faults are found."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from penstock import Pipeline, schedule, simulate
from penstock.app.config.file import build_config
from penstock.app.config.import_path import add_import_folders
from penstock.app.config.task import Task
from penstock.app.run import plain_runs
from penstock.app.run.outcome import Outcome, PlainRun, table
from penstock.app.run.plain import PlainTraining, timed
from penstock.app.run.progress import progress
from penstock.app.run.request import Request
from penstock.app.run.train import require_writable, run, train
from penstock.app.run.validation import traffic
from penstock.app.verify.command import compare, verify
from penstock.errors import InputError

pytestmark = pytest.mark.cpu_only
HERE = Path(__file__).parent
add_import_folders(HERE)

GPT = {"kind": "gpt", "width": 16, "heads": 2, "layers": 4, "length": 12}
OWN = {
    "model": {"factory": "broken:make_model", "arguments": {"careless": False}},
    "data": {"factory": "broken:make_batches"},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "training": {"steps": 3, "batch": 8, "loss": "mse", "plain_steps": 0},
}


def raw(**sections):
    whole = {
        "model": GPT,
        "pipeline": {"stages": 2, "microbatches": 4},
        "optimizer": {"lr": 1e-2},
        "training": {"steps": 12, "batch": 16, "plain_steps": 0},
    }
    return {name: whole.get(name, {}) | sections.get(name, {}) for name in {*whole, *sections}}


def task(double=False, **sections):
    return Task(build_config(raw(**sections), "test"), double)


def own(double=False, careless=False, **pipeline):
    asked = OWN | {"model": OWN["model"] | {"arguments": {"careless": careless}}}
    return Task(build_config(asked | {"pipeline": {"stages": 2, "microbatches": 4, **pipeline}}, "test"), double)


def toml(tmp_path, **sections):
    def value(found):
        if isinstance(found, dict):
            return "{" + ", ".join(f"{key} = {value(part)}" for key, part in found.items()) + "}"
        return json.dumps(found)

    file = tmp_path / "mine.toml"
    text = ""
    for name, section in raw(**sections).items():
        text += f"[{name}]\n" + "".join(f"{key} = {value(part)}\n" for key, part in section.items())
    file.write_text(text)
    return str(file)


def test_training_falls_in_loss_and_says_what_it_took():
    out = io.StringIO()
    outcome = run(task(training={"steps": 25, "log_every": 10}), out)
    assert len(outcome.losses) == len(outcome.seconds) == 25
    assert sum(outcome.losses[-5:]) < sum(outcome.losses[:5]) - 2
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/25", "10/25", "20/25", "25/25"]
    assert f"loss {outcome.losses[-1]:.4f}" in out.getvalue()
    assert len(outcome.memory) == 1
    assert outcome.step_seconds > 0


def test_the_same_config_trains_the_same():
    first, again, other = (run(task(pipeline={"stages": 2, "microbatches": 4, "seed": seed})) for seed in (1, 1, 2))
    assert first.losses == again.losses != other.losses


def test_it_is_the_pipeline_that_the_config_says():
    settings = {"stages": 2, "microbatches": 3, "schedule": "gpipe", "recompute": "always", "clip": 0.5, "timeout": 9.0}
    pipe = task(pipeline=settings | {"cuts": ["blocks.1"]}).pipeline()
    assert isinstance(pipe, Pipeline)
    assert (pipe.schedule.shape.name, pipe.microbatches) == ("gpipe", 3)
    assert [name for name, _ in pipe.split.cuts] == ["blocks.1"]
    assert pipe.optimizers.clip == 0.5
    assert pipe.stages[0].settings.recompute == "always"


def test_the_learning_rate_follows_its_scheduler():
    given = task(optimizer={"name": "SGD", "lr": 1.0, "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 0.5}})
    pipe = given.pipeline()
    for _ in pipe.train(given.batches(0, 3)):
        pass
    assert {group["lr"] for made in pipe.optimizers.optimizers.values() for group in made.param_groups} == {0.125}


def test_a_config_hands_options_to_the_schedule_and_names_our_optimizer():
    section = {"stages": 2, "microbatches": 1, "schedule": "pipemare", "options": {"t1": 7, "t2": False, "t3": 2}}
    pipe = task(pipeline=section, optimizer={"name": "nesterov", "lr": 1e-3, "weight_decay": 0.1}).pipeline()
    assert (pipe.schedule.shape.name, pipe.async_trainer.first) == ("pipemare", 2)
    (optimizer, *_) = pipe.optimizers.optimizers.values()
    assert isinstance(optimizer, torch.optim.NAdam)
    wanted = {"lr": 1e-3, "betas": (0.99, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": True}
    assert wanted.items() <= optimizer.defaults.items()


def test_training_without_a_flush_falls_in_loss_and_is_the_same_each_time():
    first, again = (
        run(task(pipeline={"stages": 3, "microbatches": 1, "schedule": "pipedream"}, training={"steps": 25}))
        for _ in range(2)
    )
    assert first.losses == again.losses
    assert len(first.seconds) == 25
    assert sum(first.losses[-5:]) < sum(first.losses[:5]) - 2
    assert first.timeline is None, "it is measured on workers alone"


def test_traffic_is_what_crosses_the_cut():
    pipe = task().pipeline()
    activations = 16 * 12 * 16 * 4
    vocab = pipe.model.tokens.weight.numel() * 4
    assert traffic(pipe, 16) == 2 * activations + 2 * vocab
    one = task(pipeline={"stages": 1, "microbatches": 4}).pipeline()
    assert traffic(one, 16) == 0


def test_traffic_of_replicas_is_what_crosses_the_cut_and_their_sums():
    """Rows are divided, so no more of them cross; a tied weight goes to each replica, its gradient back to each; of n
    replicas all but one send every gradient and get its sum."""
    pipe = task(pipeline={"stages": 2, "replicas": [3, 1], "microbatches": 4}).pipeline()
    activations = 16 * 12 * 16 * 4
    vocab = pipe.model.tokens.weight.numel() * 4
    weights = sum(parameter.numel() * 4 for parameter in pipe.split.used(0))
    assert traffic(pipe, 16) == 2 * activations + (3 + 1) * vocab + 2 * 2 * weights
    streamed = own(replicas=[2, 1], schedule="pipedream").pipeline()
    plain_cut = own().pipeline()
    first = sum(parameter.numel() * 4 for parameter in streamed.split.used(0))
    assert traffic(streamed, 8) == traffic(plain_cut, 8) + first  # half of 2 (n - 1) gradients in each mini-batch
    alone = task(pipeline={"stages": 1, "replicas": 2, "microbatches": 4}).pipeline()
    assert traffic(alone, 16) == 2 * sum(parameter.numel() * 4 for parameter in alone.model.parameters())


def test_the_plain_loop_is_plain_training():
    given = own(double=True)
    plain, model = PlainTraining(given), given.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, target in given.batches(0, 3):
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        assert plain.step(inputs, target) == pytest.approx(loss.item(), rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    for mine, wanted in zip(plain.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-10)


def test_the_plain_loop_divides_sums_by_their_weight():
    given = own(double=True)
    plain, model = PlainTraining(given), given.model()
    plain.loss = lambda result, target: ((result - target).square().sum(), torch.tensor(target.numel()))
    (inputs, target), *_ = given.batches(0, 1)
    torch.nn.functional.mse_loss(model(inputs), target).backward()
    plain.step(inputs, target)
    for mine, wanted in zip(plain.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad, rtol=1e-10)


def test_timing_a_plain_process_counts_time_and_memory():
    before = torch.get_num_threads()
    try:
        one, two = list(timed(task(), 2, [1, 2]))
    finally:
        torch.set_num_threads(before)
    assert (one["threads"], two["threads"]) == (1, 2)
    assert 0 < one["seconds"] < 10
    assert one["memory"] >= sum(p.numel() * 4 for p in task().model().parameters())


WAITING = """
import time
import torch
from torch import nn

class Waiting(nn.Linear):
    def forward(self, x):
        if torch.get_num_threads() > 1:
            time.sleep(1000)
        return super().forward(x)

def model():
    return nn.Sequential(Waiting(2, 2), nn.Linear(2, 2))

def data():
    return [(torch.ones(4, 2), torch.ones(4, 2))]
"""


def test_a_plain_process_whose_threads_wait_for_each_other_is_given_up(tmp_path):
    """On a machine that others kept busy, a step with two threads took minutes after the training was over."""
    (tmp_path / "waiting.py").write_text(WAITING)
    file = tmp_path / "waiting.toml"
    file.write_text(
        """
        model.factory = "waiting:model"
        data.factory = "waiting:data"
        pipeline.stages = 1
        training = {steps = 1, batch = 4, loss = "mse"}
        """
    )
    (only,) = plain_runs._timed(Request(str(file)), 1, [1, 2])
    assert only["threads"] == 1


def text_of(shown, width=120):
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue()


def row(shown, name):
    line = next(line for line in shown.splitlines() if line.startswith(f"│ {name}"))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_the_table_puts_the_pipeline_beside_plain_processes():
    line = simulate(schedule("1f1b", stages=2, microbatches=8), forward=1, input_grad=1, weight_grad=1)
    plain = (PlainRun(1, 0.40, 90 << 20), PlainRun(2, 0.25, 95 << 20))
    outcome = Outcome([4.0, 3.0], [9.0, 9.0, 0.2, 0.2, 0.2], [50 << 20, 60 << 20], 3 << 20, 1, line, None, plain)
    shown = text_of(table(outcome))
    assert row(shown, "time per step") == ["200 ms", "400 ms", "250 ms"]
    assert row(shown, "speed beside it") == ["", "2.00 x", "1.25 x"]
    assert row(shown, "bubble") == [f"{100 * line.bubble:.1f}%", "none", "none"]
    assert row(shown, "traffic per step") == ["3 MiB", "none", "none"]
    assert row(shown, "memory, each") == ["50 MiB", "90 MiB", "95 MiB"]
    assert "60 MiB" in shown
    assert "2 workers" in shown
    told = outcome.to_json()
    assert told["seconds_per_step"] == 0.2
    assert told["timeline"]["bubble"] == line.bubble
    assert told["plain"][1] == {"threads": 2, "seconds": 0.25, "memory": 95 << 20}


def test_the_table_does_without_what_was_not_measured():
    shown = text_of(table(Outcome([4.0], [0.5], [1 << 20], 0, 1)))
    assert "bubble" not in shown
    assert row(shown, "time per step") == ["500 ms"]


def test_on_a_terminal_there_is_a_bar_and_elsewhere_none():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with progress(4, 1, out) as show:
        for done in range(1, 5):
            show(done, 1.0 / done)
    assert "loss 0.2500" in out.getvalue()
    assert "4/4" in out.getvalue()
    with progress(4, 1, None) as show:
        show(1, 1.0)


def test_train_reports_a_loss_and_a_table(tmp_path, capsys):
    assert train(Request(toml(tmp_path), {"training.steps": 4})) == 0
    said = capsys.readouterr().out
    assert "step 4/4" in said
    assert "time per step" in said
    assert "traffic per step" in said


def test_train_as_json_says_nothing_else_on_standard_output(tmp_path, capsys):
    assert train(Request(toml(tmp_path), {"training.steps": 4}, {"json": True})) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert len(told["losses"]) == 4
    assert "step 4/4" in said.err


def test_one_plain_process_is_timed_beside_the_run(tmp_path, capsys):
    request = Request(toml(tmp_path), {"training.steps": 2, "training.plain_steps": 2}, {"json": True})
    assert train(request) == 0
    (plain, *_) = json.loads(capsys.readouterr().out)["plain"]
    assert plain["threads"] == torch.get_num_threads()
    assert plain["seconds"] > 0
    assert plain["memory"] > 0


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 2},
        {"stages": 3, "schedule": "gpipe"},
        {"stages": 2, "schedule": "zb-h1", "recompute": "always"},
        {"stages": 2, "schedule": "zb-v", "clip": 0.1},
        {"stages": 2, "schedule": "interleaved", "chunks": 2},
        {"stages": 1},
        {"stages": 2, "replicas": [1, 3]},
        {"stages": 2, "replicas": 2, "schedule": "zb-v", "clip": 0.1},
        {"stages": 1, "replicas": 4},
    ],
    ids=str,
)
def test_verify_finds_the_pipeline_equal_to_plain_training(pipeline):
    given = task(double=True, model=GPT | {"layers": 6}, pipeline={"microbatches": 4, **pipeline})
    verdict = compare(given, 4)
    assert verdict.ok
    assert verdict.loss.relative < 1e-12
    assert len(verdict.stages) == pipeline["stages"] * (2 if pipeline.get("schedule") in ("zb-v", "interleaved") else 1)
    assert sum(stage.tensors for stage in verdict.stages) == len(list(given.model().parameters()))
    assert all(stage.gradient.relative < 1e-11 for stage in verdict.stages)


def test_verify_as_trained_is_in_single_precision():
    verdict = compare(task(), 2)
    assert (verdict.kind, verdict.tolerance, verdict.ok) == ("float32", 1e-5, True)
    half = task(pipeline={"stages": 2, "microbatches": 4, "precision": "bf16"})
    assert compare(half, 2).kind == "bf16"
    assert compare(half, 2).ok
    with pytest.raises(InputError, match="float32 or bf16 to compare, but got fp16"):
        compare(task(pipeline={"stages": 2, "microbatches": 4, "precision": "fp16"}), 2)


def test_verify_is_for_synchronous_schedules():
    with pytest.raises(InputError, match=r"a synchronous schedule to verify.*'pipemare', whose weights are stale"):
        compare(task(pipeline={"stages": 2, "schedule": "pipemare"}), 1)


def test_verify_finds_a_model_that_a_pipeline_breaks():
    assert compare(own(double=True), 3).ok
    verdict = compare(own(double=True, careless=True), 3)
    assert not verdict.ok
    assert verdict.stages[0].gradient.relative > 1e-3
    assert verdict.stages[0].gradient.name.startswith("0.0.")
    assert compare(own(double=True, careless=True, schedule="naive"), 3).ok, "one micro-batch at a time hides it"


def test_verify_finds_a_loss_that_is_another_though_gradients_and_weights_are_equal():
    asked = OWN | {"training": OWN["training"] | {"loss": "broken:drifting"}, "pipeline": {"stages": 2}}
    verdict = compare(Task(build_config(asked, "test"), double=True), 2)
    assert verdict.loss.absolute >= 4  # micro-batches, and what looks at the loss alone
    assert all(part.relative < 1e-9 for stage in verdict.stages for part in (stage.gradient, stage.weight))
    assert not verdict.ok


@pytest.mark.parametrize("stage", [0, 1])
def test_verify_finds_a_stage_that_computes_a_little_wrong(monkeypatch, stage):
    from penstock.model.stage import Stage

    right = Stage.weight_gradient

    def wrong(self, job):
        right(self, job)
        if self.index == stage and job.number == 2:
            self.parameters[-1].grad.mul_(1 + 1e-6)

    monkeypatch.setattr(Stage, "weight_gradient", wrong)
    verdict = compare(own(double=True, schedule="zb-h1"), 1)
    assert not verdict.ok
    wrong_ones = [found.stage for found in verdict.stages if found.gradient.relative > verdict.tolerance]
    assert wrong_ones == [stage]


def test_verify_refuses_what_cannot_be_compared():
    with pytest.raises(InputError, match="draws random numbers; set its dropout to 0 for verify"):
        compare(task(model=GPT | {"dropout": 0.1}), 1)


def test_verify_says_what_it_found_and_leaves_with_its_code(tmp_path, capsys):
    file = toml(tmp_path)
    assert verify(Request(file, {}, {"steps": 2})) == 0
    said = capsys.readouterr().out
    assert "the pipeline trains as one plain process: 2 steps in double" in said
    assert verify(Request(file, {}, {"steps": 2, "json": True})) == 0
    assert [stage["stage"] for stage in json.loads(capsys.readouterr().out)["stages"]] == [0, 1]
    assert verify(Request(str(HERE / "broken.toml"), {}, {"steps": 2})) == 1
    assert "does NOT train as one plain process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"factory": "nowhere:make"}}, "model.factory: expected a module .*'nowhere'"),
        ({"model": {"factory": "broken:make_modle"}}, "did you mean broken:make_model?"),
        ({"model": {"factory": "broken:make_model"}}, "model.arguments: .*missing a required argument: 'careless'"),
        ({"model": {"factory": "broken:make_batches"}}, "makes an nn.Module, but got generator"),
        ({"data": {"factory": "broken:nothing"}}, "data.factory: expected a function in broken"),
        ({"training": OWN["training"] | {"loss": "broken:none"}}, "training.loss"),
    ],
)
def test_what_a_config_names_must_be_there(sections, said):
    given = Task(build_config(OWN | {"pipeline": {"stages": 2}} | sections, "test"))
    with pytest.raises(InputError, match=said):
        given.pipeline()


def test_an_optimizer_that_does_not_take_all_weights_is_refused():
    with pytest.raises(InputError, match=r"optimizer.name: .*Muon \(Muon only supports 2D.*; write \"muon\", which"):
        task(model=GPT, optimizer={"name": "Muon", "lr": 0.01}).pipeline()


def test_a_vocabulary_smaller_than_the_texts_is_refused():
    with pytest.raises(InputError, match=r"model.vocab: expected at least the data's"):
        task(model=GPT | {"vocab": 5}).pipeline()


def test_losses_keep_falling_over_steps_of_the_example_model():
    losses = run(task(training={"steps": 30})).losses
    assert all(later < sooner for sooner, later in pairwise([sum(losses[k : k + 10]) for k in (0, 10, 20)]))


def test_a_run_goes_on_where_its_checkpoint_stopped(tmp_path):
    kept = {"steps": 6, "checkpoint": str(tmp_path / "run"), "checkpoint_every": 2}
    whole = run(task(training=kept)).losses
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-4", "step-6"]
    later = task(
        pipeline={"stages": 3, "microbatches": 4}, training={"steps": 6, "resume": str(tmp_path / "run" / "step-4")}
    )
    assert run(later).losses == pytest.approx(whole[4:], rel=1e-5)
    with pytest.raises(InputError, match="more than the 6"):
        run(task(training={"steps": 6, "resume": str(tmp_path / "run" / "step-6")}))


def test_ranks_that_look_at_the_place_of_a_report_at_once_do_not_disturb_each_other(tmp_path):
    path = str(tmp_path / "run.html")
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(lambda _: require_writable(path), range(400)))
    assert not Path(path).exists()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_place_that_checkpoints_cannot_be_written_to_is_found_before_the_first_step(tmp_path, schedule):
    (tmp_path / "file").write_text("")
    for taken in ("step-2", "step-7"):  # which is none that this run would write
        (tmp_path / "run" / taken).mkdir(parents=True)
    way = {"stages": 2, "microbatches": 4, "schedule": schedule}
    asked = {"steps": 6, "checkpoint": str(tmp_path / "run"), "checkpoint_every": 2}
    wrong = f"directory that checkpoints can be written to, but got {tmp_path / 'file'}"
    for path, words in (
        ("run", f"where nothing is yet, but got {tmp_path / 'run' / 'step-2'}, which"),
        ("file", wrong),
    ):
        told = io.StringIO()
        with pytest.raises(InputError, match=words):
            run(task(pipeline=way, training=asked | {"checkpoint": str(tmp_path / path)}), told)
        assert "step" not in told.getvalue()
    (tmp_path / "run" / "step-2").rmdir()
    run(task(pipeline=way, training=asked))
    assert "step-6" in {file.name for file in (tmp_path / "run").iterdir()}


def test_a_checkpoint_of_a_pipe_that_is_full_is_named_for_what_it_has_trained(tmp_path):
    pipeline = {"stages": 3, "microbatches": 1, "schedule": "pipedream"}
    kept = {"steps": 8, "checkpoint": str(tmp_path / "run"), "checkpoint_every": 3}
    whole = run(task(pipeline=pipeline, training=kept)).losses
    found = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run").iterdir())
    assert len(whole) == 8
    assert found[-1] == 8
    assert all(index > 3 for index in found), "a save drains the pipe: what is in flight is trained before it"
    resumed = {"steps": 8, "resume": str(tmp_path / "run" / f"step-{found[0]}")}
    assert len(run(task(pipeline=pipeline, training=resumed)).losses) == 8 - found[0]
