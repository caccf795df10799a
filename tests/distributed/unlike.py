"""Models whose forwards are unlike in each process, or on each batch, trained by ranks beside plain training.

Run as a script, by every rank: python unlike.py CASES FILE, which trains each case and writes how far the weights are
from plain training's, or what the refusal said.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PenstockError

WIDTH, WORDS, PARTS = 8, 31, 2
HERE = int(os.environ.get("RANK", "0"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Four blocks and two tables, and a forward that a case gives."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tables = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("full", "sliding", "none")})
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.body = forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.body(self, *args, **kwargs)


KEYS = ("full", "sliding", "none")


def through_a_set(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    held = {key: m.tables[key](x) for key in set(KEYS)}
    for at, block in enumerate(m.blocks):
        x = block(x) + held[KEYS[at % 3]]
    return x


def one_module_through_a_set(m: Model, x: Tensor) -> Tensor:
    scales = {"one": 1.0, "two": 2.0, "three": 3.0}
    held = {key: torch.tanh(m.first(x * scales[key])) for key in set(scales)}
    for block, key in zip(m.blocks, ("one", "two", "three", "one"), strict=True):
        x = block(x) * held[key]
    return x


def glue_through_a_set(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    held = {key: torch.sin(x * len(key)) for key in set(KEYS)}
    for at, block in enumerate(m.blocks):
        x = block(x) + held[KEYS[at % 3]]
    return x


def sorted_by_hash(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    held = {key: torch.tanh(m.tables[key](x)) for key in sorted(KEYS, key=hash)}
    for block in m.blocks:
        x = block(x) + held["full"] * held["none"]
    return x + held["sliding"]


def sorted_by_address(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    tables = sorted(m.tables.values(), key=lambda _: hash(object()))
    held = {id(table): table(x) for table in tables}
    for block, key in zip(m.blocks, (*KEYS, "full"), strict=True):
        x = block(x) + held[id(m.tables[key])]
    return x


def other_numbers(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    for block in m.blocks:
        x = block(x) * (1 + hash("salt") % 1000)
    return x


def other_layers(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    for at, block in enumerate(m.blocks):
        x = block(x) + (m.tables["full"](x) if at == 2 and hash("salt") % 2 else 0)
    return x + m.tables["full"](x)


def blocks_through_a_set(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    for at in sorted(range(4), key=lambda at: hash(str(at))):
        x = m.blocks[at](x)
    return x


def masked(m: Model, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Looks at the mask, as transformers do."""
    x = m.first(x)
    if mask is not None and not bool(mask.all()):
        x = x * mask[..., None]
    for block in m.blocks:
        x = block(x)
        if mask is not None and mask.sum() < mask.numel():
            x = x.masked_fill(mask[..., None] == 0, 0.5)
    return x


def shaded(m: Model, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Makes a mask of its own from what is padding, changes it in place between blocks, and looks at it."""
    shade = torch.ones(x.shape[:2])
    if mask is not None:
        shade[mask == 0] = 0.5
    x = m.first(x)
    for at, block in enumerate(m.blocks):
        x = block(x) * (1 * shade)[..., None]
        shade[:, at % 3].mul_(1.25)
        if shade.mean() < 1.1:
            x = torch.tanh(x) - shade[..., None].exp()
    return x + shade[..., None]


def checkpointed(m: Model, x: Tensor, mask: Tensor | None = None) -> Tensor:
    x = m.first(x)
    for block in m.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x if mask is None else x * mask[..., None]


class Sometimes(nn.Module):
    """An identity for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else self.inner(x)


def identities(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    for at, block in enumerate(m.blocks):
        x = m.tables[KEYS[at % 3]](block(x)) * 0.5 + x
    return x


class Adds(nn.Module):
    """Puts what it makes into a dict and a list that all layers share."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.inner, self.at = nn.Linear(WIDTH, WIDTH), at

    def forward(self, x: Tensor, shared: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        x = torch.tanh(self.inner(x)) + sum(rows)
        shared[f"layer {self.at}"] = x * 2
        rows.append(x)
        return x + shared["layer 0"]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adds(at) for at in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        rows: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, shared, rows)
        return x + sum(shared.values()) + rows[1]


def elsewhere(m: Model, x: Tensor, again: Tensor | None = None) -> Tensor:
    """Uses the first layer's weights once more at the end, for some inputs."""
    x = m.first(x)
    for block in m.blocks:
        x = block(x)
    return x if again is None else m.first(x) + again


class Converted(nn.Module):
    """Code between blocks that calls what may give back a weight as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Parameter(torch.randn(WIDTH)), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.start.to(x.dtype).contiguous().type_as(x).flatten().expand_as(x)
        for block in self.blocks:
            x = block(x) + z
            z = z + x
        return x


class Registered(nn.Module):
    """Parameters and buffers whose order is that of a set."""

    def __init__(self) -> None:
        super().__init__()
        for name in set(KEYS):
            self.register_buffer(f"{name}_scale", torch.full((WIDTH,), 1.0 + len(name)))
            self.register_parameter(name, nn.Parameter(torch.full((WIDTH,), 0.1 * len(name))))
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.full + self.sliding_scale
        for block in self.blocks:
            x = block(x) / self.full_scale
        return x * self.none + self.full


KINDS = {"one": nn.Tanh, "two": nn.ReLU, "three": nn.SiLU, "four": nn.Sigmoid, "five": nn.ELU}


class Layered(nn.Module):
    """Layers without weights, under names that are the same in each process, and of classes that may not be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kinds = nn.ModuleList(KINDS[name]() for name in set(KINDS))

    def forward(self, x: Tensor) -> Tensor:
        for block, kind in zip(self.blocks, self.kinds, strict=False):
            x = kind(block(x))
        return x


def result_through_a_set(m: Model, x: Tensor) -> dict[str, Tensor]:
    x = through_blocks(m, m.first(x))
    return {key: m.tables[key](x) for key in set(KEYS)}


def from_a_dict(m: Model, **given: Tensor) -> Tensor:
    x = m.first(given["full"])
    held = {key: m.tables[key](value) for key, value in given.items()}
    for block, key in zip(m.blocks, (*KEYS, "none"), strict=True):
        x = block(x) + held[key]
    return x


class Case(NamedTuple):
    """What is trained, and on which batches; `example` may be another kind of input than the batches are."""

    model: nn.Module
    example: Any
    batches: list[tuple[Any, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    parts: int = PARTS  # of plain training: what a decision by data sees


def numbers(forward: Callable[..., Tensor]) -> Case:
    return floats(Model(forward))


def floats(model: nn.Module, parts: int = PARTS) -> Case:
    data = [(torch.randn(4, 3, WIDTH), torch.randn(4, 3, WIDTH)) for _ in range(3)]
    return Case(model, data[0][0], data, _square, parts)


def _square(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


def batches_through_a_set() -> Case:
    """Inputs and targets in dicts, of another order in each process; some labels are left out, as the loss says."""
    data = []
    for _ in range(3):
        inputs = {key: torch.randn(4, 3, WIDTH) for key in KEYS}
        target = {key: torch.randint(0, 2, (4, 3)) for key in KEYS}
        target["full"][0], target["none"][1:3] = 0, 0
        data.append(({key: inputs[key] for key in set(KEYS)}, {key: target[key] for key in set(KEYS)}))
    return Case(Model(from_a_dict), data[0][0], data, _left_out)


def _left_out(out: Tensor, target: dict[str, Tensor]) -> Tensor:
    return sum(((out.mean(-1) * (at + 1)).square() * target[key]).mean() for at, key in enumerate(KEYS))  # type: ignore[return-value]


def _each(out: dict[str, Tensor], target: Tensor) -> Tensor:
    return sum(F.mse_loss(out[key], target * at) for at, key in enumerate(KEYS))  # type: ignore[return-value]


def padded(forward: Callable[..., Tensor], first: str = "full") -> Case:
    """Batches with a mask and of other lengths, where the example has none."""
    data = []
    for length, cut in ((3, 3), (5, 2), (4, 3), (3, 1), (5, 5)):
        mask = torch.ones(4, length)
        mask[1:, cut:] = 0
        data.append(({"x": torch.randn(4, length, WIDTH), "mask": mask}, torch.randn(4, length, WIDTH)))
    example: Any = data[1][0] if first == "padded" else {"x": data[0][0]["x"]}
    return Case(Model(forward), example, data, _square)


def _tokens(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), target.flatten())


def text(kind: str, **options: Any) -> Case:
    """A small model of transformers, with padding that differs from batch to batch."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "Gemma3":
        sizes.update(
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention"] * 2 + ["full_attention"] * 2,
        )
        model: nn.Module = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, use_cache=False))
    elif kind == "Llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1, **options))
    elif kind == "Bert":
        dropless = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropless))
    else:
        raise ValueError(kind)
    if kind == "Llama" and options.get("use_cache") is False:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    data = []
    for length, cut in ((6, 6), (8, 3), (5, 4), (6, 2)):
        ids = torch.randint(1, WORDS, (4, length))
        mask = torch.ones(4, length, dtype=torch.long)
        mask[::2, cut:] = 0
        data.append(({"input_ids": ids, "attention_mask": mask}, torch.randint(0, WORDS, (4, length))))
    return Case(model, {"input_ids": data[0][0]["input_ids"]}, data, _tokens)


def moved() -> Case:
    """Batches of which some use a weight on another stage than the example does."""
    data: list[tuple[Any, Tensor]] = [({"x": torch.randn(4, 3, WIDTH)}, torch.randn(4, 3, WIDTH)) for _ in range(3)]
    data[1][0]["again"] = torch.randn(4, 3, WIDTH)
    return Case(Model(elsewhere), data[0][0], data, _square)


class Drops(Model):
    """Leaves each block out by a random number drawn between them, and tells which it has kept."""

    def __init__(self, draw: Callable[[], float], chance: float) -> None:
        super().__init__(through_blocks)
        self.draw, self.chance = draw, chance
        self.kept: list[bool] | None = None  # what to do in place of drawing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = self.first(x), []
        for at, block in enumerate(self.blocks):
            keep = self.draw() >= self.chance if self.kept is None else self.kept[at]
            kept.append(keep)
            if keep:
                x = block(x)
        return x, torch.tensor(kept)


def dropped(draw: Callable[[], float], chance: float) -> Case:
    """Plain training leaves out what the pipeline did: its loss function is told."""
    return numbers(through_blocks)._replace(model=Drops(draw, chance), loss=_NotedLoss())


class _NotedLoss:
    def __init__(self) -> None:
        self.kept: dict[float, list[bool]] = {}  # by the sum of a micro-batch's target

    def __call__(self, out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        self.kept[float(target.sum())] = out[1].tolist()
        return F.mse_loss(out[0], target)


def through_blocks(m: Model, x: Tensor) -> Tensor:
    x = m.first(x)
    for block in m.blocks:
        x = block(x)
    return x


CASES: dict[str, Callable[[], Case]] = {
    "through a set": lambda: numbers(through_a_set),
    "one module through a set": lambda: numbers(one_module_through_a_set),
    "glue through a set": lambda: numbers(glue_through_a_set),
    "sorted by hash": lambda: numbers(sorted_by_hash),
    "sorted by address": lambda: numbers(sorted_by_address),
    "result through a set": lambda: numbers(result_through_a_set)._replace(loss=_each),
    "batches through a set": batches_through_a_set,
    "layers through a set": lambda: floats(Layered()),
    "gemma3": lambda: text("Gemma3"),
    "other numbers": lambda: numbers(other_numbers),
    "other layers": lambda: numbers(other_layers),
    "blocks through a set": lambda: numbers(blocks_through_a_set),
    "masked": lambda: padded(masked),
    "padded, then full": lambda: padded(masked, "padded"),
    "changed in place": lambda: padded(shaded),
    "changed in place, padded first": lambda: padded(shaded, "padded"),
    "checkpointed": lambda: padded(checkpointed),
    "llama": lambda: text("Llama"),
    "llama without cache": lambda: text("Llama", use_cache=False),
    "bert": lambda: text("Bert"),
    "identities": lambda: sometimes(),
    "a weight used elsewhere": lambda: moved(),
    "a weight as it is": lambda: floats(Converted()),
    "registered through a set": lambda: floats(Registered()),
    "additions": lambda: floats(Shared()),
    "never dropped by torch": lambda: dropped(lambda: float(torch.rand([])), 0.0),
    "dropped by torch": lambda: dropped(lambda: float(torch.rand([])), 0.5),
    "dropped by a draw in place": lambda: dropped(lambda: float(torch.empty([]).uniform_(0, 1)), 0.5),
    "dropped by random": lambda: dropped(random.random, 0.5),
    "dropped by numpy": lambda: dropped(lambda: float(np.random.uniform(0, 1)), 0.5),
    "dropped by both": lambda: dropped(lambda: 0.5 * (random.random() + float(torch.rand([]))), 0.5),
}


def sometimes() -> Case:
    case = numbers(identities)
    for key in KEYS:
        case.model.tables[key] = Sometimes()  # type: ignore[union-attr,operator]
    return case


def plain(case: Case, model: nn.Module) -> nn.Module:
    """The same training in one process, without any pipeline."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    words = case.loss is _tokens
    noted = dict(case.loss.kept) if isinstance(case.loss, _NotedLoss) else {}
    for inputs, target in case.batches:
        optimizer.zero_grad()
        count = len(next(iter(target.values())) if isinstance(target, dict) else target)
        for part in range(case.parts):
            rows = slice(part * count // case.parts, (part + 1) * count // case.parts)
            some = {k: v[rows] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
            if isinstance(model, Drops):
                model.kept = noted[float(target[rows].sum())]
            out = model(**some) if isinstance(some, dict) else model(some)
            wanted = {k: v[rows] for k, v in target.items()} if isinstance(target, dict) else target[rows]
            (case.loss(out, wanted) * (wanted.numel() if words else 1 / case.parts)).backward()
        if words:  # divided at the end: what is float32 inside rounds as the pipeline's does, which adds up tokens
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / target.numel()
        optimizer.step()
    return model


def trained(case: Case, stages: int, schedule: str = "1f1b") -> float:
    """The largest distance of a weight from plain training's, after a step on each batch."""
    reference = copy.deepcopy(case.model)
    pipe = penstock.Pipeline(
        case.model, example=case.example, stages=stages, schedule=schedule, microbatches=PARTS, loss=case.loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), timeout=30,
    )  # fmt: skip
    for inputs, target in case.batches:
        pipe.step(inputs, target)
    found = pipe.state_dict()
    pipe.close()
    if isinstance(case.loss, _NotedLoss) and not case.loss.kept:
        return 0.0  # another rank has the loss, and compares
    wanted = plain(case, reference).state_dict()
    return max(
        float((found[name] - tensor).abs().max()) for name, tensor in wanted.items() if tensor.is_floating_point()
    )


def outcome(name: str, stages: int, schedule: str = "1f1b") -> float | str:
    torch.manual_seed(5)
    case = CASES[name]()
    try:
        return trained(case, stages, schedule)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"


def main(names: str, file: str) -> None:
    _begin_with_own_hashes()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    stages = int(os.environ["WORLD_SIZE"])
    found = {name: outcome(name, stages) for name in names.split(";")}
    Path(f"{file}.{HERE}").write_text(json.dumps(found))


def _begin_with_own_hashes() -> None:
    """Hashes of strings are fixed when Python starts: a rank that is to have others of its own starts again."""
    seeds = os.environ.get("HASHES", "").split(",")
    if len(seeds) > HERE and os.environ.get("PYTHONHASHSEED") != seeds[HERE]:
        os.environ["PYTHONHASHSEED"] = seeds[HERE]
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main(*sys.argv[1:])
