"""A config: read as it is meant, and every wrong key and value named at once, each with its path and a way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.app.config.file import read_config
from penstock.app.config.schema import GivenModel, GPTModel
from penstock.errors import FormatError, InputError

REPLICAS = "a whole number of at least 1, or a list of one for each rank"
EXAMPLES = Path(__file__).parents[3] / "examples"
GOOD = """
[model]
kind = "gpt"
width = 16
heads = 2
layers = 4
length = 8
[pipeline]
stages = 2
microbatches = 4
[optimizer]
name = "AdamW"
lr = 1e-3
betas = [0.9, 0.95]
[training]
steps = 3
batch = 8
"""


def config(tmp_path, text, **changes):
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return read_config(file, changes)


def faults(tmp_path, text):
    """Each fault's line, by its path."""
    with pytest.raises(FormatError) as caught:
        config(tmp_path, text)
    said = str(caught.value).removeprefix(f"{tmp_path / 'mine.toml'}: ")
    assert not re.search("pydantic|validation error|https?:|type=", said), "our words, not a library's"
    lines = said.split("\n  ")
    if len(lines) > 1:
        count = re.fullmatch(r"expected a config without faults, but got (\d+) of them; correct each:", lines.pop(0))
        assert count is not None
        assert int(count[1]) == len(lines)
    return dict(line.split(": ", 1) for line in lines)


def test_a_good_config_is_what_it_says(tmp_path):
    found = config(tmp_path, GOOD)
    assert isinstance(found.model, GPTModel)
    assert (found.model.width, found.model.dropout, found.data.tokens) == (16, 0.0, "characters")
    assert (found.pipeline.schedule, found.pipeline.microbatches, found.pipeline.chunks) == ("1f1b", 4, None)
    assert found.optimizer.arguments == {"lr": 1e-3, "betas": (0.9, 0.95)}
    assert (found.training.steps, found.training.log_every) == (3, 10)


def test_values_can_be_put_in_place_of_the_files(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert read_config(file, {"training.steps": 7}).training.steps == 7
    with pytest.raises(InputError, match=r"training.steps: expected a whole number of at least 1, but got 0"):
        read_config(file, {"training.steps": 0})


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_the_examples_are_good(file):
    assert read_config(file).pipeline.stages == 2


def test_a_factory_stands_in_for_a_kind(tmp_path):
    text = GOOD.replace('kind = "gpt"\nwidth = 16\nheads = 2\nlayers = 4\nlength = 8', 'factory = "mine.models:make"')
    found = config(tmp_path, text + '[data]\nfactory = "mine.data:make"\narguments = { rows = 4 }\n')
    assert isinstance(found.model, GivenModel)
    assert found.model.factory == "mine.models:make"
    assert found.data.arguments == {"rows": 4}


@pytest.mark.parametrize(
    ("said", "counts"),
    [("", [1, 1]), ("replicas = 1", [1, 1]), ("replicas = 3", [3, 3]), ("replicas = [2, 1]", [2, 1])],
)
def test_replicas_of_all_ranks_or_of_each(tmp_path, said, counts):
    section = config(tmp_path, GOOD.replace("stages = 2", f"stages = 2\n{said}")).pipeline
    assert (section.counts, section.workers) == (counts, sum(counts))


def test_an_asynchronous_schedule_with_its_options(tmp_path):
    text = GOOD.replace("stages = 2", 'stages = 2\nschedule = "pipemare"')
    found = config(tmp_path, text + '[pipeline.options]\nt1 = 50\nt2 = 0.135\nt3 = 20\npredict = "xpipe"\n')
    assert found.pipeline.options == {"t1": 50, "t2": 0.135, "t3": 20, "predict": "xpipe"}


def test_a_whole_section_can_be_put_in_place_of_the_files(tmp_path):
    found = config(tmp_path, GOOD, optimizer={"name": "nesterov", "lr": 0.1})
    assert (found.optimizer.name, found.optimizer.arguments) == ("nesterov", {"lr": 0.1})
    found = config(tmp_path, GOOD, optimizer={"name": "muon", "lr": 0.1, "momentum": 0.9})
    assert (found.optimizer.name, found.optimizer.arguments) == ("muon", {"lr": 0.1, "momentum": 0.9})


def test_what_is_held_out_by_a_function_and_what_no_sample_can_be_of(tmp_path):
    text = GOOD + '[data]\nfactory = "mine:train"\nvalidation = "mine:held_out"\n'
    assert config(tmp_path, text.replace("length = 8", "length = 8\nvocab = 9")).data.validation == "mine:held_out"
    found = faults(tmp_path, text.replace('"mine:held_out"', "0.1").replace("steps = 3", "steps = 3\nsample = 9"))
    assert found["data.validation"].startswith('expected a function, as "package.module:function", but got 0.1')
    assert found["training.sample"].startswith("expected 0 for anything but text and the model gpt, but got 9")


def test_everything_wrong_is_said_at_once(tmp_path):
    text = """
        colour = "red"
        [model]
        kind = "gtp"
        width = "wide"
        heds = 4
        layers = 0
        length = 64
        [data]
        tokens = "words"
        [pipline]
        stages = 2
        [pipeline]
        stages = 2.5
        schedule = "1f2b"
        microbatches = 8
        steps = 3
        cuts = ["a", 3]
        clip = -1.0
        precision = "fp8"
        [optimizer]
        name = "AdamX"
        [optimizer.scheduler]
        T_max = 3
        [training]
        batch = 4
        log_every = true
        checkpoint_every = 5
        clip = 1.0
    """
    found = faults(tmp_path, text)
    expected = {
        "colour": "a section, but got an unknown one; choose one of data, model, optimizer",
        "pipline": "a section, but got an unknown one; did you mean pipeline?",
        "model.kind": '"gpt", or factory = "package.module:function" in its place, but got "gtp"',
        "model.width": 'a whole number of at least 1, but got "wide"',
        "model.heads": "a whole number of at least 1, but got nothing; add it",
        "model.heds": "a key of [model], but got an unknown one; did you mean heads?",
        "model.layers": "a whole number of at least 1, but got 0",
        "data.tokens": '"characters" or "bytes", but got "words"',
        "pipeline.stages": "a whole number of at least 1, but got 2.5",
        "pipeline.schedule": "the name of a method, but got '1f2b'; try 1f1b",
        "pipeline.steps": "a key of [pipeline], but got an unknown one; it belongs in [training]",
        "pipeline.cuts[1]": "a list of the modules at which the second, third, ... piece begins, but got 3",
        "pipeline.clip": "a number above 0, but got -1.0",
        "pipeline.precision": '"bf16" or "fp16", but got "fp8"',
        "optimizer.name": 'a class of torch.optim, but got "AdamX"; did you mean Adam?',
        "optimizer.scheduler.name": "the name of a class, but got nothing; add it",
        "training.steps": "a whole number of at least 1, but got nothing; add it",
        "training.batch": "at least 8 rows, one for each micro-batch, but got 4",
        "training.log_every": "a whole number of at least 1, but got true",
        "training.clip": "a key of [training], but got an unknown one; it belongs in [pipeline]",
        "training.checkpoint": "a path to write checkpoints to, but got nothing",
    }
    assert found.keys() == expected.keys()
    for path, said in expected.items():
        assert found[path].startswith(f"expected {said}"), found[path]


@pytest.mark.parametrize(
    ("old", "new", "path", "said"),
    [
        ("width = 16", "width = 15", "model.width", "a multiple of its 2 heads, but got 15"),
        ("length = 8", "length = 8\ndropout = 1.0", "model.dropout", "a share of at least 0 and below 1, but got 1.0"),
        ("[pipeline]", "[data]\nlength = 9\n[pipeline]", "data.length", "at most model.length, 8, but got 9"),
        ("[pipeline]", '[data]\nkind = "digits"\n[pipeline]', "data.kind", '"text" for a model that reads tokens'),
        ("[pipeline]", '[data]\nfactory = "a:b"\n[pipeline]', "model.vocab", "how many different tokens the data has"),
        ("[pipeline]", '[data]\nfactory = "a.b"\n[pipeline]', "data.factory", 'a function, as "package.'),
        ("[pipeline]", '[data]\nkind = "txt"\n[pipeline]', "data.kind", '"text" or "digits", or factory'),
        ("[pipeline]", "[data]\nvalidation = 1.0\n[pipeline]", "data.validation", "a share above 0 and below 1, but"),
        ("[pipeline]", "[data]\nvalidation = true\n[pipeline]", "data.validation", "a share above 0 and below 1"),
        ("steps = 3", "steps = 3\nvalidation = 0.1", "training.validation", "a key of [training], but got an unknown"),
        ("steps = 3", "steps = 3\nsample = -1", "training.sample", "a whole number of at least 0, but got -1"),
        ("stages = 2", "stages = 2\noptions = 3", "pipeline.options", "a table of the schedule's options, but got 3"),
        ("stages = 2", "stages = 2\noptions = {polcy = 'pa'}", "pipeline.options.polcy", "an option of 1f1b, but got"),
        (
            "stages = 2",
            "stages = 2\noptions = {t1 = 5}",
            "pipeline.options.t1",
            "an asynchronous schedule, but got 1f1b",
        ),
        (
            "stages = 2",
            "stages = 2\nschedule = 'dapple'\noptions = {policy = 'pc'}",
            "pipeline.options.policy",
            "dapple's policy to be 'pa' or 'pb', but got 'pc'",
        ),
        (
            "stages = 2",
            "stages = 2\nschedule = 'pipemare'\noptions = {t1 = 0, t2 = true}",
            "pipeline.options.t1",
            "t1 to be a whole number of at least 1",
        ),
        (
            "stages = 2",
            "stages = 2\nschedule = 'pipedream'\noptions = {t2 = 0.1}",
            "pipeline.options.t2",
            "t2 with a schedule whose backward takes the newest weights",
        ),
        (
            "stages = 2",
            "stages = 2\nschedule = 'pipedream'\noptions = {vertical_sync = true, stash = false}",
            "pipeline.options",
            "weight stashing where vertical_sync is on",
        ),
        (
            "stages = 2",
            "stages = 2\nschedule = 'auto'\noptions = {seed = 1}",
            "pipeline.options.seed",
            "an option of auto",
        ),
        ("stages = 2", "stages = 5\nschedule = '2bw'", "pipeline", "2bw's microbatches to be at least its depth of 5"),
        ("microbatches = 4", 'microbatches = 3\nschedule = "interleaved"', "pipeline", "interleaved's microbatches"),
        ("stages = 2", 'stages = 2\ncuts = ["a", "b"]', "pipeline", "1 cuts for 2 pieces, but got 2"),
        ("stages = 2", "stages = 2\nchunks = 3", "pipeline", r"exactly 1 chunk(s) a rank for 1f1b, but got 3"),
        ("stages = 2", "stages = 2\nseed = -1", "pipeline.seed", "a whole number of at least 0, but got -1"),
        ("stages = 2", "stages = 2\nclip = inf", "pipeline.clip", "a number above 0, but got inf"),
        ("stages = 2", 'stages = "2"', "pipeline.stages", 'a whole number of at least 1, but got "2"'),
        ("stages = 2", "stages = 2\nreplicas = 0", "pipeline.replicas", f"{REPLICAS}, but got 0"),
        ("stages = 2", "stages = 2\nreplicas = true", "pipeline.replicas", f"{REPLICAS}, but got true"),
        ("stages = 2", "stages = 2\nreplicas = '2:1'", "pipeline.replicas", f'{REPLICAS}, but got "2:1"'),
        ("stages = 2", "stages = 2\nreplicas = []", "pipeline.replicas", f"{REPLICAS}, but got []"),
        ("stages = 2", "stages = 2\nreplicas = [2, 1.5]", "pipeline.replicas", f"{REPLICAS}, but got [2, 1.5]"),
        (
            "stages = 2",
            "stages = 2\nreplicas = [2, 1, 1]",
            "pipeline.replicas",
            "a positive replica count for each of 2 ranks, but got [2, 1, 1]",
        ),
        (
            "stages = 2",
            "stages = 2\nreplicas = 9",
            "training.batch",
            "at least 9 rows, one for each replica, but got 8",
        ),
        ("stages = 2", "stages = 2\nreplicas = [2, 1]\nchunks = 3", "pipeline", r"exactly 1 chunk(s) a rank for 1f1b"),
        (
            "stages = 2",
            "stages = 2\nshard = 'optimizer'",
            "pipeline.shard",
            "stages of several replicas where shard divides state, but got one replica each",
        ),
        (
            "stages = 2",
            "stages = 2\nreplicas = 2\nshard = 'optimizer'\nschedule = '2bw'",
            "pipeline.shard",
            "a schedule with a flush where shard divides state, but got 2bw, which updates without one",
        ),
        ("lr = 1e-3", "lr = nan", "optimizer.lr", "finite numbers, but got nan"),
        ("betas = [0.9, 0.95]", "betas = [0.9, nan]", "optimizer.betas", "finite numbers, but got [0.9, nan]"),
        ("lr = 1e-3", "weight_decay = -inf", "optimizer.weight_decay", "finite numbers, but got -inf"),
        (
            "lr = 1e-3",
            "lr = 1e-3\nscheduler = {name = 'StepLR', step_size = 1, gamma = inf}",
            "optimizer.scheduler.gamma",
            "finite numbers, but got inf",
        ),
        ("lr = 1e-3", "lr = -1.0", "optimizer.lr", "a value that AdamW takes, but got -1.0 (Invalid learning rate: "),
        ("lr = 1e-3", "weight_deca = 1.0", "optimizer.weight_deca", "an argument of torch.optim.AdamW, but got an un"),
        ('"AdamW"', '"muon"\nmatrices = 1', "optimizer.matrices", "an argument of muon, but got an unknown"),
        ('"AdamW"', '"nesterov"\nmomentum = 0.9', "optimizer.momentum", "an argument of nesterov, but got an unknown"),
        ('"AdamW"', '"LBFGS"', "optimizer.name", "a class of torch.optim"),
        ("[training]", "[optimizer.scheduler]\nname = 3\n[training]", "optimizer.scheduler.name", "the name of"),
        ("[training]", '[optimizer.scheduler]\nname = "StepLR"\n[training]', "optimizer.scheduler.step_size", "an arg"),
        ('name = "AdamW"', "scheduler = 3", "optimizer.scheduler", "a section [optimizer.scheduler], but got 3"),
        ("steps = 3", 'steps = 3\nloss = "hinge"', "training.loss", '"cross-entropy", "mse", or a function'),
        ("steps = 3", 'steps = 3\nreport = ""', "training.report", 'a path, but got ""'),
    ],
)
def test_one_fault_is_one_line(tmp_path, old, new, path, said):
    assert old in GOOD
    found = faults(tmp_path, GOOD.replace(old, new))
    assert list(found) == [path]
    assert found[path].startswith(f"expected {said}"), found[path]


def test_every_value_that_an_optimizer_or_a_scheduler_refuses_has_its_own_line(tmp_path):
    """torch itself stops at the first; and what it says of a scheduler that lacks an argument names no key."""
    text = GOOD.replace("lr = 1e-3", 'lr = "fast"\nweight_decay = -1\neps = 1e-8\namount = 3')
    text += '[optimizer.scheduler]\nname = "OneCycleLR"\npct_start = 7.0\nanneal_strategy = "steps"\n'
    found = faults(tmp_path, text)
    expected = {
        "optimizer.lr": 'a value that AdamW takes, but got "fast" (',
        "optimizer.weight_decay": "a value that AdamW takes, but got -1 (Invalid weight_decay value: -1)",
        "optimizer.amount": "an argument of torch.optim.AdamW, but got an unknown one",
        "optimizer.scheduler.max_lr": "an argument that torch.optim.lr_scheduler.OneCycleLR needs, but got nothing",
    }
    assert found.keys() == expected.keys()
    for path, said in expected.items():
        assert found[path].startswith(f"expected {said}"), found[path]
    text = GOOD + '[optimizer.scheduler]\nname = "CyclicLR"\nbase_lr = 0.1\nmax_lr = 1.0\nmode = "zigzag"\n'
    assert list(faults(tmp_path, text)) == ["optimizer.scheduler.mode"]
    text = GOOD + '[optimizer.scheduler]\nname = "StepLR"\nstep_size = 3\nlast_epoch = "two"\n'
    assert list(faults(tmp_path, text)) == ["optimizer.scheduler.last_epoch"]


def test_values_that_are_wrong_together_are_told_of_the_section(tmp_path):
    sgd = GOOD.replace("betas = [0.9, 0.95]", "").replace('"AdamW"', '"SGD"\nnesterov = true')
    assert list(faults(tmp_path, sgd)) == ["optimizer.nesterov"]
    assert list(faults(tmp_path, sgd.replace("lr = 1e-3", "lr = -1\nmomentum = 0.9"))) == ["optimizer.lr"]
    found = faults(tmp_path, sgd.replace("nesterov", "fused = true\nforeach"))
    assert found["optimizer"].startswith("expected values that SGD takes together, but got")
    text = GOOD + '[optimizer.scheduler]\nname = "OneCycleLR"\nmax_lr = 0.1\ntotal_steps = 9\npct_start = 7.0\n'
    found = faults(tmp_path, text)
    assert found["optimizer.scheduler"].startswith("expected values that OneCycleLR takes together, but got")


@pytest.mark.parametrize("length", ["total_steps = 2", "epochs = 2\nsteps_per_epoch = 1"])
def test_a_scheduler_that_is_shorter_than_the_run(tmp_path, length):
    text = GOOD + f'[optimizer.scheduler]\nname = "OneCycleLR"\nmax_lr = 0.1\n{length}\n'
    said = "expected at least training.steps, 3, but got 2; enlarge it, or lower training.steps"
    assert faults(tmp_path, text) == {"optimizer.scheduler.total_steps": said}
    assert config(
        tmp_path, text.replace(" = 2\nsteps_per", " = 3\nsteps_per").replace("total_steps = 2", "total_steps = 3")
    )


def test_a_mistyped_name_of_a_scheduler_is_told_beside_the_missing_one(tmp_path):
    found = faults(tmp_path, GOOD + '[optimizer.scheduler]\nnam = "StepLR"\nstep_size = 3\n')
    path, unknown = "optimizer.scheduler", "an unknown one; did you mean name?"
    assert found == {
        f"{path}.name": "expected the name of a class, but got nothing; add it",
        f"{path}.nam": f"expected a key of [{path}], but got {unknown}",
    }


def test_a_section_that_is_none(tmp_path):
    text = GOOD[GOOD.index("[optimizer]") :].replace("[optimizer]", "pipeline = 3\nmodel = []\n[optimizer]")
    assert faults(tmp_path, text) == {
        "model": "expected a section [model], but got []",
        "pipeline": "expected a section [pipeline], but got 3",
    }


def test_files_that_are_no_toml_say_where(tmp_path):
    with pytest.raises(FormatError, match=r"mine.toml:3:9: expected TOML, but got invalid value; correct the line"):
        config(tmp_path, "\n[model]\nwidth = = 3\n")
    with pytest.raises(FormatError, match=r"nowhere.toml: expected a readable TOML file, but got No such file"):
        read_config(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes("# gr\xfc\xdfe".encode("latin-1"))
    with pytest.raises(FormatError, match="in UTF-8"):
        read_config(tmp_path / "latin.toml")
    with pytest.raises(FormatError, match="Is a directory"):
        read_config(tmp_path)


def test_long_values_are_cut_short(tmp_path):
    found = faults(tmp_path, GOOD.replace("stages = 2", f'stages = "{"x" * 500}"'))
    assert len(found["pipeline.stages"]) < 200


@pytest.mark.parametrize(
    ("said", "came"),
    [('shard = "weights"', 'got "weights"'), ("shard = 2", "got 2"), ("shard = true", "got true")],
)
def test_a_shard_is_one_of_those_there_are(tmp_path, said, came):
    text = GOOD.replace("stages = 2", f"stages = 2\nreplicas = 2\n{said}")
    with pytest.raises(FormatError, match=rf'pipeline\.shard: expected "optimizer" or "gradients", but {came}'):
        config(tmp_path, text)
    good = GOOD.replace("stages = 2", 'stages = 2\nreplicas = 2\nshard = "gradients"')
    assert config(tmp_path, good).pipeline.shard == "gradients"
