"""The convergence study runs, and its page shows what its results say."""

import pytest
import torch
from benchmarks.study.costs import method_cost
from benchmarks.study.methods import METHODS
from benchmarks.study.page import PAGE, cost, filled
from benchmarks.study.plan import RESULTS, cells, missing, read
from benchmarks.study.run import Run, pipeline, train
from benchmarks.study.tasks import TASKS

import penstock
from penstock.app.compare.memory import stage_bytes


def losses(pipe, task, count):
    data = task.train(seed=0)
    return [step.loss for step in pipe.train([next(data) for _ in range(count)])]


@pytest.mark.parametrize("method", ["synchronous", "pipedream nesterov", "pipemare T1+T2+T3", "2bw muon"])
def test_a_short_run(method):
    found = train(Run("text", method, 4, 3e-3, 0), updates=25)
    assert len(found["curve"]) == 5
    assert found["curve"][-1] < found["curve"][0]
    assert 0 < found["held_out"] < 5


def test_a_short_run_on_digits():
    pytest.importorskip("sklearn")
    found = train(Run("digits", "pipemare T1+T2", 16, 3e-3, 0), updates=5)
    assert 0 < found["final"] < 3


@pytest.mark.parametrize(("method", "shape"), [("2bw predict", (4, 4)), ("synchronous", (4, 8))])
def test_losses_of_these_do_not_depend_on_stages_or_micro_batches(method, shape):
    run, task = Run("text", method, 0, 3e-3, 0), TASKS["text"]
    assert not METHODS[method].staged
    assert losses(pipeline(run), task, 6) == pytest.approx(losses(pipeline(run, shape), task, 6), abs=1e-4)


def test_the_page_holds_the_tables_and_the_cost_of_the_results():
    page = PAGE.read_text()
    assert cost(read()) in page
    assert filled(page, read()) == page
    assert page.count("<!-- ") == 5


def test_the_study_is_complete_and_small():
    assert not list(missing(read()))
    assert {cell[2] for cell in cells()} == {0, 4, 8, 16}
    assert RESULTS.stat().st_size < 300_000


@pytest.mark.parametrize(
    "name", ["2bw", "2bw predict", "pipedream", "pipedream predict", "pipemare bare", "pipemare T2"]
)
def test_versions_are_as_many_as_the_engine_holds(name):
    """Forecasts and corrected weights included, on the rank that has most."""
    torch.manual_seed(0)
    method, p = METHODS[name], 4
    m = max(1, method.times * p)
    pipe = penstock.Pipeline(
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(p))), example=torch.randn(m, 4), stages=p,
        schedule=method.schedule, microbatches=m, loss=torch.nn.functional.mse_loss, optimizer=method.optimizer,
        verify=False, **method.options,
    )  # fmt: skip
    most = 0.0
    for _ in pipe.train([(torch.randn(m, 4), torch.randn(m, 4)) for _ in range(20)]):
        most = max(most, *(1 + held["versions"] / held["weights"] for held in stage_bytes(pipe).values()))
    assert method_cost(name, p).versions == most
