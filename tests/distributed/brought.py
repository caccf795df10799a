"""What a user may bring, done on ranks and inline alike: each case returns what every rank finds, as JSON.

Run as a script, by every rank: python brought.py CASE FILE, which writes FILE.RANK.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
import penstock.model.materialise
import recursion_models

F64 = torch.float64


class Encoded(nn.Module):
    """torch's own encoder behind a table, as text models have it."""

    def __init__(self, layers: int = 4, norm: bool = True, checked: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=F64)
        self.table = nn.Embedding(11, 8, dtype=F64)
        last = nn.LayerNorm(8, dtype=F64) if norm else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm=last, mask_check=checked)
        self.head = nn.Linear(8, 3, dtype=F64)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(ids), src_key_padding_mask=padding))


def texts(which: str, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Rows of five words, with their padding at the end, at the beginning, or without any."""
    lengths = torch.arange(rows) % 4 + 2
    places = torch.arange(5)[None, :]
    padding = {
        "behind": places >= lengths[:, None],
        "before": places < 5 - lengths[:, None],
        "none": torch.zeros(rows, 5, dtype=torch.bool),
    }[which]
    torch.manual_seed(5)
    return torch.randint(0, 11, (rows, 5)), padding


def squares(out: Tensor, target: Any) -> Tensor:
    return out.square().mean()


def encoder(ranks: int) -> Any:
    """Trained, then evaluated with padding of every kind, and trained on: results count at padded places, too."""
    torch.manual_seed(1)
    pipe = penstock.Pipeline(
        Encoded(), example=tuple(part[:2] for part in texts("behind")), stages=ranks, microbatches=2, loss=squares,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    )  # fmt: skip
    losses = [pipe.step(texts("behind")).loss]
    losses += [pipe.evaluate([(texts(which), None)]) for which in ("behind", "before", "none")]
    pipe.model.eval()
    results = [pipe.forward(texts(which)).tolist() for which in ("behind", "before", "none")]
    pipe.model.train()
    losses.append(pipe.step(texts("before")).loss)
    pipe.close()
    return {"losses": losses, "results": results}


def weightless(ranks: int) -> Any:
    """Two models without weights, filled by `load`: one that kept its buffers, and one wholly on the meta device."""
    found = []
    for maker in (penstock.model.materialise.weightless, lambda: torch.device("meta")):
        torch.manual_seed(2)
        state = normed(ranks).state_dict()
        state["0.1.running_mean"].fill_(7.0)
        with maker():
            model = normed(ranks)
        images, target = torch.randn(8, 2, 4, 4, dtype=F64), torch.randn(8, 2, 4, 4, dtype=F64)
        pipe = penstock.Pipeline(
            model, example=images[:2], stages=ranks, microbatches=2, loss=nn.functional.mse_loss,
            load=state.__getitem__, optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )  # fmt: skip
        losses = [pipe.step(images, target).loss for _ in range(2)]
        found.append({"losses": losses, "state": {name: value.tolist() for name, value in pipe.state_dict().items()}})
        pipe.close()
    return found


def normed(blocks: int) -> nn.Module:
    """Convolutions with norms, whose running averages are buffers that a state dict has."""
    parts = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(*parts).to(F64)


def model_itself(ranks: int) -> Any:
    """What a call of the model, and of each of its layers, says on a rank that has some of their weights."""
    torch.manual_seed(4)
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 * ranks))), torch.randn(4, 3)
    wanted = model(x)
    pipe = penstock.Pipeline(model, example=x[:1], stages=ranks, microbatches=2)
    said = []
    for call in (model, *model):
        try:
            said.append(call(x).shape == wanted.shape)
        except penstock.InputError as error:
            said.append(str(error))
    same = torch.equal(pipe.forward(x), wanted)  # after all that
    pipe.close()
    return {"said": said, "same": same}


def language_model() -> nn.Module:
    """A small one of transformers', which computes its loss itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(F64)


def dict_loader() -> Iterable[Mapping[str, Tensor]]:
    """Batches as a tokenizer and a DataLoader give them; the last has three rows."""
    from transformers import BatchEncoding

    draw = torch.Generator().manual_seed(8)
    rows = []
    for _ in range(11):
        ids = torch.randint(3, 17, (6,), generator=draw)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    return [BatchEncoding(batch) if at else batch for at, batch in enumerate(loader)]


def dicts(ranks: int) -> Any:
    """Batches of keywords in a step, a loop and an evaluation; given to every rank, or to rank 0 alone."""
    losses = []
    for data in ("every", "rank0"):
        loader = dict_loader()
        pipe = penstock.Pipeline(
            language_model(), example={name: part[:2] for name, part in loader[0].items()}, stages=ranks,
            microbatches=4, loss=lambda out, target: out.loss, data=data,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        )  # fmt: skip
        here = data == "every" or pipe.ranks.world.rank == 0
        found = [step.loss for step in pipe.train(loader if here else None)]
        found += [pipe.step(loader[1] if here else None).loss, pipe.evaluate(loader if here else None)]
        found.append(pipe.forward(loader[2] if here else None).logits.sum().item())
        losses.append(found)
        pipe.close()
    return losses


# Persons' own, by their law; each is a few mini-batches of two stages.
OWN = {
    "stash": """
        # law: stash
        # microbatches: 1
        # batches: 4
        0F0,0F1,0B0,0B1,0F2@2,0F3@2,0B2@2,0B3@2
        1F0,1I0,1W0,1F1@1,1B1@1,1F2@2,1I2@2,1W2@2,1F3@3,1B3@3
        """,
    "vertical": """
        # law: vertical
        # microbatches: 1
        # batches: 4
        0F0,0F1,0B0,0B1,0F2@2,0F3@2,0B2@2,0B3@2
        1F0,1B0,1F1,1B1,1F2@2,1B2@2,1F3@2,1B3@2
        """,
    "newest": """
        # law: newest
        # microbatches: 1
        # batches: 4
        0F0,0F1,0B0,0B1@1,0F2@2,0F3@2,0B2@2,0B3@3
        1F0,1B0,1F1@1,1B1@1,1F2@2,1B2@2,1F3@3,1B3@3
        """,
    "2bw": """
        # law: 2bw
        # microbatches: 2
        # batches: 3
        0F0,0F1,0F2,0B0,0F3,0B1,0F4@1,0B2,0F5@1,0B3,0B4@1,0B5@1
        1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4@1,1B4@1,1F5@1,1B5@1
        """,
}


def own(law: str) -> penstock.Schedule:
    return penstock.from_csv(textwrap.dedent(OWN[law]).lstrip())


def own_without_a_flush(ranks: int) -> Any:
    """Losses and weights of persons' own schedules, for more mini-batches than they list."""
    found = {}
    for law in OWN if ranks == 2 else ():
        model = recursion_models.chain(2, layers=4, width=3)
        pipe = penstock.Pipeline(
            model.module, example=model.batches(1, 2)[0][0], cuts=["1"], schedule=own(law), loss=model.loss,
            verify=False, optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        )  # fmt: skip
        losses = [step.loss for step in pipe.train(model.batches(10, rows=3))]
        found[law] = {"losses": losses, "weights": {n: w.tolist() for n, w in pipe.state_dict().items()}}
        pipe.close()
    return found


CASES = {"encoder": encoder, "weightless": weightless, "dicts": dicts, "own": own_without_a_flush}
ALL = {**CASES, "model_itself": model_itself}


def main(case: str, file: str) -> None:
    torch.set_num_threads(1)
    found = ALL[case](int(os.environ["WORLD_SIZE"]))
    Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
