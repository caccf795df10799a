"""`penstock show` draws what a run has written."""

from __future__ import annotations

import json

import pytest
from timelines import measured, plain
from typer.testing import CliRunner

from penstock.cli import app, main
from penstock.core.timeline import Timeline


@pytest.fixture
def files(tmp_path):
    for name, line in (("predicted", plain()), ("measured", measured())):
        (tmp_path / f"{name}.json").write_text(json.dumps(line.to_json()))
    return [str(tmp_path / "predicted.json"), str(tmp_path / "measured.json")]


def test_one_timeline(files, tmp_path):
    told = CliRunner().invoke(app, ["show", files[1], "--svg", str(tmp_path / "a.svg")])
    assert told.exit_code == 0
    assert "1f1b, measured: makespan" in told.stdout
    assert "rank 3" in told.stdout
    assert "1f1b, measured" in (tmp_path / "a.svg").read_text()


def test_several_over_each_other(files, tmp_path):
    pictures = {kind: tmp_path / f"both.{kind}" for kind in ("svg", "html", "trace")}
    asked = [part for kind, file in pictures.items() for part in (f"--{kind}", str(file))]
    assert CliRunner().invoke(app, ["show", *files, *asked]).exit_code == 0
    assert all("predicted" in file.read_text() and "measured" in file.read_text() for file in pictures.values())


def test_figures_as_json(files):
    one = json.loads(CliRunner().invoke(app, ["show", files[1], "--json"]).stdout)
    assert one == {"file": files[1], **Timeline.from_json(measured().to_json()).figures()}
    both = json.loads(CliRunner().invoke(app, ["show", *files, "--json"]).stdout)
    assert [line["file"] for line in both] == files


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), ("F0,F1", "not JSON"), ('{"a": 1}', "the key 'timeline'")]
)
def test_files_that_are_no_timelines(content, said, tmp_path, monkeypatch, capsys):
    file = tmp_path / "some.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr("sys.argv", ["penstock", "show", str(file)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err
