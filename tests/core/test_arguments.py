"""A call with a wrong argument names it and the nearest right one, for all that `penstock` has; mypy sees it, too."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock import InputError, PenstockError, Pipeline
from penstock.core.arguments import named
from penstock.core.cost import FlatCosts, flat_costs
from penstock.errors import ArgumentError
from penstock.schedules.options import MethodOptions, TrainingOptions
from penstock.schedules.registry import METHODS
from penstock.training.staleness import NAMES

torch.set_num_threads(1)


PROFILE = penstock.Profile((penstock.Layer("a", 1.0, 1.0, 1.0),), samples=1)


def callables() -> list[str]:
    every = [name for name in penstock.__all__ if callable(getattr(penstock, name))]
    return [name for name in every if name != "Op" and not name.endswith("Error")]


def misspelled(name: str) -> str:
    return name[:-2] + name[-1] if len(name) > 3 else name + "x"


@pytest.mark.parametrize("name", callables())
def test_every_argument_of_everything_public_misspelled(name):
    function = getattr(penstock, name)
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    assert parameters
    for parameter in parameters:
        wrong = misspelled(parameter.name)
        needed = {p.name: None for p in parameters if p.default is inspect.Parameter.empty and p is not parameter}
        with pytest.raises(ArgumentError, match=rf"{name} takes, but got '{wrong}'; did you mean \w+\?") as caught:
            function(**needed, **{wrong: None})
        assert isinstance(caught.value, (TypeError, InputError))
        assert isinstance(caught.value, PenstockError)


@pytest.mark.parametrize("name", ["Pipeline", "simulate", "schedule", "plan", "Cluster", "profile", "check"])
def test_an_argument_that_must_be_given(name):
    function = getattr(penstock, name)
    first = next(iter(inspect.signature(function).parameters))
    with pytest.raises(ArgumentError, match=f"expected {first}= for {name}, but got none; give {first}"):
        function()


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Pipeline(sequence(), example=torch.ones(1, 2), stages=2, optimzer=None),
            "'optimzer'; .*mean optimizer",
        ),
        (lambda: Pipeline(sequence(), example=torch.ones(1, 2), stages=2, wheels=4), "'wheels'; leave it out"),
        (lambda: Pipeline(sequence(), torch.ones(1, 2)), "too many positional arguments; give them by name"),
        (lambda: penstock.schedule("pipedream", stages=2, vertical_sink=True), "'vertical_sink'; .*vertical_sync"),
        (lambda: penstock.loop("2bw", stages=2, microbatch=2), "'microbatch'; did you mean microbatches"),
        (lambda: penstock.simulate(penstock.schedule("1f1b", stages=2, microbatches=2), forwrd=1), "mean forward"),
        (lambda: penstock.plan(None, None, replica=2), "'replica'; did you mean replicas"),
    ],
)
def test_options_that_nobody_has(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_methods_of_a_pipeline():
    pipe = Pipeline(sequence(), example=torch.ones(1, 2), stages=2, loss=lambda out, target: out.sum())
    for call, words in (
        (lambda: pipe.step(torch.ones(4, 2), targt=1), r"Pipeline.step takes, but got 'targt'; did you mean target\?"),
        (lambda: pipe.switch("gpipe", microbatch=2), "switch takes, but got 'microbatch'; did you mean microbatches"),
        (lambda: pipe.evaluate(), "loader= for Pipeline.evaluate, but got none"),
        (lambda: pipe.save(pth="x"), "but got 'pth'; did you mean path"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


ITS_OWN = {"again", "jobs", "mini_batch"}  # that no user calls
METHODS_OF_A_PIPELINE = [
    name
    for name, method in inspect.getmembers(Pipeline, inspect.isfunction)
    if not name.startswith("_") and name not in ITS_OWN and len(inspect.signature(method).parameters) > 1
]


@pytest.mark.parametrize("name", METHODS_OF_A_PIPELINE)
def test_every_method_of_a_pipeline_without_its_arguments(name):
    """Those that came later, export and import_weights, were forgotten once."""
    pipe = Pipeline(sequence(), example=torch.ones(1, 2), stages=2)
    with pytest.raises(ArgumentError, match=rf"for Pipeline\.{name}, but got none; give "):
        getattr(pipe, name)()


def test_each_of_several_wrong_arguments_has_its_nearest():
    words = "but got 'optimizr', 'los'; did you mean optimizer and loss"
    with pytest.raises(ArgumentError, match=words):
        Pipeline(sequence(), example=torch.ones(1, 2), stages=2, optimizr=None, los=None)


PIPE = Pipeline(sequence(), example=torch.ones(1, 2), stages=2)
ONE_F = penstock.schedule("1f1b", stages=2, microbatches=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: penstock.simulate("1f1b", forward=1), "expected a Schedule, but got '1f1b'; make one: "),
        (lambda: penstock.check("mine.csv"), r"a Schedule, but got 'mine.csv'; .*penstock.from_csv\(text\)"),
        (lambda: penstock.check(None), "a Schedule, but got NoneType"),
        (lambda: penstock.lower(3), "a Schedule, but got 3"),
        (lambda: penstock.to_csv([ONE_F]), "a Schedule, but got list"),
        (lambda: penstock.to_torch_csv("x"), "a Schedule, but got 'x'"),
        (lambda: penstock.breakdown("x", None), "a Schedule, but got 'x'"),
        (lambda: penstock.breakdown(ONE_F, None), "Costs, but got NoneType; "),
        (lambda: penstock.simulate(penstock.loop("2bw", stages=2, microbatches=2)), r"got Loop; give loop.unroll\("),
        (lambda: penstock.from_csv("mine.csv"), "the text of a schedule, but got 'mine.csv'; read a file first"),
        (lambda: penstock.from_csv(Path("mine.csv")), "the text of a schedule, but got PosixPath mine.csv"),
        (lambda: penstock.from_csv(None), "the text of a schedule, but got NoneType"),
        (lambda: penstock.from_torch_csv(3), "the text of a schedule, but got int 3"),
        (lambda: penstock.plan("profile.json", "pc"), r"a Profile, but got 'profile.json'; .*penstock.read_profile\("),
        (lambda: penstock.plan(PROFILE, "pc"), r"a Cluster, but got 'pc'; .*penstock.read_cluster\("),
        (lambda: penstock.read_cluster(3), "the path of a file, but got 3"),
        (lambda: penstock.read_profile(None), "the path of a file, but got None"),
        (lambda: PIPE.save(None), "the path of a file, but got None"),
        (lambda: PIPE.load(3), "the path of a file, but got 3"),
        (lambda: PIPE.export(None), "the path of a file, but got None"),
        (lambda: PIPE.import_weights(b"x"), "the path of a file, but got b'x'"),
        (lambda: penstock.schedule(ONE_F, stages=2), "the name of a method, but got a Schedule"),
    ],
)
def test_something_else_in_the_place_of_a_noun(call, words):
    """A name or a path, mostly: they once ended in an AttributeError from deep inside."""
    with pytest.raises(InputError, match=words):
        call()


def test_a_type_error_of_the_function_itself_is_its_own():
    @named
    def odd(value: int) -> int:
        return len(value)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as caught:
        odd(3)
    assert not isinstance(caught.value, InputError)


def test_the_types_know_all_options_there_are():
    options = {option for method in METHODS.values() for option in method.options}
    assert set(MethodOptions.__annotations__) == options
    assert set(TrainingOptions.__annotations__) == options - {"seed"} | set(NAMES)
    assert set(FlatCosts.__annotations__) == set(inspect.signature(flat_costs).parameters) - {"shape"}


def test_mypy_sees_wrong_arguments(tmp_path):
    """torch is left out, which takes a minute: its types are then Any."""
    (tmp_path / "user.py").write_text(
        textwrap.dedent(
            """
            import penstock

            plan = penstock.schedule("pipedream", stages=2, microbatches=1, stash=False)
            penstock.simulate(plan, forward=1.0, transfer=[0.1])
            pipe = penstock.Pipeline(None, example=None, stages=2, schedule="1f1b", t1=3, optimizer=None)
            penstock.schedule("1f1b", stages=4, microbtches=8)
            penstock.simulate(plan, forwrd=1.0)
            penstock.Pipeline(None, example=None, optimzer=None)
            pipe.switch("pipedream", stash="no")
            pipe.step(None, targt=None)
            """
        )
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\nignore_errors = True\n")
    words = ["--config-file", "mypy.ini", "--cache-dir", ".cache", "--no-error-summary", "user.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], capture_output=True, text=True, timeout=400, cwd=tmp_path
    )
    found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line}
    assert sorted(found) == [7, 8, 9, 10, 11], done.stdout + done.stderr
    for line, name in ((7, "microbtches"), (8, "forwrd"), (9, "optimzer"), (11, "targt")):
        assert f'Unexpected keyword argument "{name}"' in found[line]
    assert 'incompatible type "str"; expected "bool"' in found[10]
