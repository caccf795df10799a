"""Micro-batches of as many rows share a path only where nobody looks at their data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from penstock import Pipeline

torch.set_num_threads(1)


class Branching(nn.Module):
    """Open code that looks at the data decides which block runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.up, self.down, self.last = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        positive = bool(x.sum() > 0)
        x = self.first(x).tanh()
        x = self.up(x) if positive else self.down(x)
        return self.last(x)


def test_micro_batches_alike_in_rows_and_not_in_data_take_their_own_paths():
    x = torch.cat([torch.full((2, 4), value, dtype=torch.float64) for value in (1.0, -1.0, 1.0, -1.0)])
    y, plain = torch.zeros(8, 4, dtype=torch.float64), Branching()
    sum(F.mse_loss(plain(x[at : at + 2]), y[at : at + 2]) for at in (0, 2, 4, 6)).div(4).backward()
    pipe = Pipeline(Branching(), example=x[:2], cuts=["last"], schedule="1f1b", microbatches=4, loss=F.mse_loss,
                    verify=False)  # fmt: skip
    pipe.step(x, y)
    for (name, mine), wanted in zip(pipe.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad, atol=1e-12), name


def test_micro_batches_alike_are_looked_up_once(monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = Pipeline(model, example=torch.ones(2, 4), stages=2, microbatches=4, loss=F.mse_loss, verify=False)
    asked, path = [], pipe.split.path
    monkeypatch.setattr(pipe.split, "path", lambda *given: asked.append(len(given[0][0])) or path(*given))
    pipe.step(torch.ones(8, 4), torch.zeros(8, 4))
    assert asked == [2]
    pipe.step(torch.ones(10, 4), torch.zeros(10, 4))  # micro-batches of 2 and of 3 rows
    assert sorted(asked) == [2, 2, 3]
