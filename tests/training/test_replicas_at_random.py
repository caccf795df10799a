"""Random combinations of replicas, schedule, rows, micro-batches and options give the numbers of one process."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import plain
from replicated import METHODS, pipeline

torch.set_num_threads(1)
F64 = torch.float64


class Words(nn.Module):
    """A small model with a tied weight, and code between its modules that folds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(plain.WORDS, 4), nn.Embedding(plain.LENGTH, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, plain.WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        x = self.tokens(ids) + self.places(torch.arange(length))
        x = x.view(rows * length, -1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).view(rows, length, -1)


def model() -> nn.Module:
    torch.manual_seed(3)
    return Words().to(F64)


LOSSES = {
    "mean": (plain.token_loss, False),
    "ignored": (plain.mean_token_loss, True),
    "sum and weight": (plain.counted_token_loss, True),
}


@st.composite
def combinations(draw: st.DrawFn) -> dict[str, object]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda counts: max(counts) > 1))
    method = draw(st.sampled_from(list(METHODS)))
    parts = draw(st.integers(1, 3)) * len(counts)
    accumulate = draw(st.sampled_from([1, 1, 1, 2]))
    rows = draw(st.lists(st.integers(max(counts), 12), min_size=2, max_size=2))
    options = {
        "recompute": draw(st.sampled_from(["never", "never", "except-last", "always"])),
        "clip": draw(st.sampled_from([None, 0.05, 1e9])),
        "accumulate": accumulate,
        "schedule": method,
        "microbatches": parts,
        "verify": draw(st.booleans()),
        **METHODS[method],
    }
    return {"counts": counts, "rows": rows, "loss": draw(st.sampled_from(list(LOSSES))), "options": options}


def batches(rows: list[int], ignored: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(sum(rows))
    every = [plain.with_ignored(count) if ignored else (plain.tokens(count), plain.tokens(count)) for count in rows]
    for _, target in every:
        target[0, 0] = 5  # something is counted
    return every


def trained(loss: str, data: list[tuple[torch.Tensor, torch.Tensor]], clip: float | None, accumulate: int) -> nn.Module:
    """Plain training of whole batches; accumulated ones are one batch."""
    whole = model()
    optimizer = plain.adamw(whole.parameters())
    score = plain.mean_token_loss if LOSSES[loss][1] else LOSSES[loss][0]
    for at in range(0, len(data), accumulate):
        x, y = (torch.cat([batch[side] for batch in data[at : at + accumulate]]) for side in (0, 1))
        plain.backward(whole, score, x, y)
        if clip is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return whole


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(combinations())
def test_two_hundred_random_combinations(asked):
    counts, options, (loss, ignored) = asked["counts"], asked["options"], LOSSES[asked["loss"]]
    data = batches(asked["rows"], ignored)
    pipe = pipeline(plain.Case(model(), loss, data), counts, **options)
    updated = [step.updated for step in pipe.train(data)]
    assert updated[-1]
    wanted = trained(asked["loss"], data, options["clip"], options["accumulate"])
    assert plain.off(plain.weights(pipe.model), plain.weights(wanted)) < 1e-10
