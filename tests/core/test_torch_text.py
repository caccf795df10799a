"""PyTorch's own loader reads what we write, and we read what it writes."""

from __future__ import annotations

import pytest

from penstock import FormatError, InputError, check, from_torch_csv, schedule, to_torch_csv
from penstock.core.torch_text import is_torch_csv

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

CASES = [
    ("gpipe", 4, 8, {}),
    ("1f1b", 4, 8, {}),
    ("interleaved", 4, 8, {"chunks": 2}),
    ("zb-h1", 4, 8, {}),
    ("zb-v", 4, 8, {}),
    ("dualpipe-v", 4, 10, {}),
    ("dualpipe-v", 4, 10, {"overlap": True}),
]


def bare_runtime(shape):
    """PyTorch's runtime without process groups: its loader, validation and lowering ask for no more."""
    runtime = object.__new__(pipelining._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages = {}, []
    runtime.pp_group_size, runtime._num_stages = shape.ranks, shape.stages
    runtime._n_microbatches, runtime._defer_pp_recv = shape.microbatches, False
    return runtime


@pytest.mark.parametrize(("name", "p", "m", "options"), CASES)
def test_pytorchs_loader_accepts_our_csv(tmp_path, name, p, m, options):
    built = schedule(name, stages=p, microbatches=m, **options)
    file = tmp_path / "ours.csv"
    file.write_text(to_torch_csv(built))
    runtime = bare_runtime(built.shape)
    runtime._load_csv(str(file), format="compute_only")  # parses, validates, and adds its own transfers
    lines = file.read_text().splitlines()
    assert [[str(action) for action in runtime.pipeline_order[rank]] for rank in range(p)] == [
        line.split(",") for line in lines
    ]
    assert runtime.stage_index_to_group_rank == dict(enumerate(built.shape.placement))
    compute = [a for row in runtime.pipeline_order_with_comms.values() for a in row if a.is_compute_op]
    assert len(compute) >= sum(len(line.split(",")) for line in lines)


@pytest.mark.parametrize(("name", "p", "m", "options"), CASES)
def test_our_csv_for_pytorch_comes_back_as_the_same_schedule(name, p, m, options):
    built = schedule(name, stages=p, microbatches=m, **options)
    back = from_torch_csv(to_torch_csv(built))
    assert back.rows.same_as(built.rows)
    assert back.shape.placement == built.shape.placement


def test_words_that_pytorchs_runtime_added_are_dropped():
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert is_torch_csv(text)
    built = from_torch_csv(text)
    assert built.words() == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert check(built).ok


@pytest.mark.parametrize(("name", "arguments"), [("pipedream", {}), ("1f1b", {"microbatches": 2, "batches": 2})])
def test_what_pytorch_cannot_say_is_refused(name, arguments):
    with pytest.raises(InputError, match="synchronous schedule of one mini-batch"):
        to_torch_csv(schedule(name, stages=2, **arguments))


def test_cells_keep_their_numbers_when_added_words_are_dropped():
    with pytest.raises(FormatError, match="line 1, cell 4"):
        from_torch_csv("0UNSHARD,0F0,0SEND_F0,0Q0\n")
