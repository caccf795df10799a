"""What users bring trains on ranks as it does inline, which is compared with plain training elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import brought
import pytest
import torch

from ranks import launched

torch.set_num_threads(1)


def on_ranks(case: str, ranks: int, folder: Path) -> list:
    with launched(folder, ranks, case, str(folder / "found"), script=brought.__file__) as run:
        assert run.wait() == 0, run.said
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


def test_a_call_of_the_model_itself_points_to_the_pipeline(tmp_path):
    words = (
        "expected a call of the pipeline, as each rank has the weights of its own stages alone, but got a call of the "
        "model, whose Linear has its weight on another rank; call pipe.forward(inputs), or pipe.evaluate(loader), on "
        "every rank; pipe.state_dict() has all weights"
    )
    for rank, found in enumerate(on_ranks("model_itself", 2, tmp_path)):
        assert found["same"]
        assert found["said"] == [words, *([words if rank else True] * 2), *([True if rank else words] * 2)]
    assert brought.model_itself(2) == {"said": [True] * 5, "same": True}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", brought.CASES)
def test_ranks_find_what_one_process_finds(case, ranks, tmp_path):
    wanted = json.loads(json.dumps(brought.CASES[case](ranks)))
    assert on_ranks(case, ranks, tmp_path) == [wanted] * ranks
