"""Models of every kind that is split in tests: how to make one, what it takes, and a score of what it returns."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model import tree

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
WIDTH, WORDS = 8, 19


@dataclass(frozen=True)
class Animal:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Any]  # rows, length
    cuts: tuple[str, ...]  # by name, into four
    by_parts: bool = False  # what a row gives depends on the rows it comes with: batch normalisation
    transformers: bool = False


def score(result: Any, _: Any = None) -> Tensor:
    """A mean over rows that weighs every number a model returns."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tree.tensors(result):
        if tensor.is_floating_point() and tensor.requires_grad:
            rows = tensor.double().sin().reshape(tensor.shape[0], -1) if tensor.dim() else tensor.double().view(1, 1)
            total = total + (rows * torch.linspace(0.5, 1.5, rows.shape[1], dtype=torch.float64)).sum(1).mean()
    return total


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def words(rows: int, length: int) -> Tensor:
    return torch.randint(1, WORDS, (rows, length))


def padded(rows: int, length: int) -> Tensor:
    """A mask with a different number of words in every row."""
    return (torch.arange(length)[None] < (torch.arange(rows)[:, None] % (length - 1)) + 2).long()


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(count: int = 6) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


class Of(nn.Module):
    """A model from its parts and a function of them."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


class UNet(nn.Module):
    """Every skip crosses all stages between its ends."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 4, 6, 8)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = F.relu(down(x))
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.middle(x)
        for up in reversed(self.up):
            skip = skips.pop()
            x = up(torch.cat([F.interpolate(x, skip.shape[-2:]), skip], 1))
        return x


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm_one(self.one(x)))
        return self.relu(self.norm_two(self.two(y)) + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(True)
        self.layers = nn.Sequential(*(Residual(6) for _ in range(5)))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.relu(self.norm(self.stem(x))))
        return self.head(torch.flatten(self.pool(x), 1))


class Recurrent(nn.Module):
    """States come with the rows in the second dimension; the model returns them rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.one, self.two = (nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, state = self.one(self.words(ids))
        x, (hidden, _) = self.two(x, state)
        return self.head(x), hidden.transpose(0, 1)


class ManyInputs(nn.Module):
    """Tensors, None, an int, a string and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.blocks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), blocks(4)

    def forward(
        self, a: Tensor, others: dict[str, Any], times: int, how: str, bias: Tensor | None = None, flag: bool = True
    ) -> Tensor:
        x = self.left(a)
        for at, block in enumerate(self.blocks):
            x = block(x) * times
            if at == 1:
                x = x + self.right(others["b"]) if how == "add" else x * self.right(others["b"])
        return x if bias is None else x + bias


class DictInDictOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks, self.head = nn.Embedding(WORDS, WIDTH), blocks(4), nn.Linear(WIDTH, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        x = self.words(batch["ids"]) * batch["mask"][..., None]
        out: dict[str, Any] = {"kind": "scores", "layers": []}
        for block in self.blocks:
            x = block(x)
            out["layers"].append(x)
        return {**out, "scores": self.head(x), "nothing": None}


@dataclass
class Answer:
    scores: Tensor
    hidden: Tensor
    name: str = "answer"
    extra: Any = None


Pair = namedtuple("Pair", ["first", "second"])


def chain_of(wrap: Callable[[Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    """Blocks whose middle result is returned as well, in some container."""

    def body(m: Of, x: Tensor) -> Any:
        middle = None
        for at, block in enumerate(m.blocks):
            x = block(x)
            middle = x if at == 2 else middle
        return wrap(m.head(x), middle)

    return lambda: Of(body, blocks=blocks(), head=nn.Linear(WIDTH, 3))


def twice() -> nn.Module:
    def body(m: Of, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = block(m.shared(x))
        return m.shared(x)

    return Of(body, blocks=blocks(4), shared=Block())


def tied() -> nn.Module:
    def body(m: Of, ids: Tensor) -> Tensor:
        x = m.words(ids)
        for block in m.blocks:
            x = block(x)
        return m.head(x) + F.linear(x, m.words.weight)

    model = Of(body, words=nn.Embedding(WORDS, WIDTH), blocks=blocks(), head=nn.Linear(WIDTH, WORDS, bias=False))
    model.head.weight = model.words.weight
    model.blocks[1].down.weight = model.blocks[4].down.weight
    return model


def glue() -> nn.Module:
    """Parameters and buffers that no submodule reads, but the code around them."""

    def body(m: Of, ids: Tensor) -> Tensor:
        x = m.words(ids) + m.places[: ids.shape[1]]
        mask = m.shade[: ids.shape[1]].exp()
        for block, gate in zip(m.blocks, m.gates, strict=True):
            x = x + gate * block(x) * mask[:, None]
        return x @ m.out * m.scale

    model = Of(body, words=nn.Embedding(WORDS, WIDTH), blocks=blocks())
    model.places, model.gates = nn.Parameter(floats(32, WIDTH)), nn.Parameter(torch.rand(6, dtype=torch.float64))
    model.out = nn.Parameter(floats(WIDTH, 3))
    model.register_buffer("shade", floats(32))
    model.register_buffer("scale", torch.tensor(0.3, dtype=torch.float64), persistent=False)
    return model


def frozen() -> nn.Module:
    model = Of(lambda m, ids: m.body_(m.words(ids)), words=nn.Embedding(WORDS, WIDTH), body_=nn.Sequential(*blocks()))
    for part in (model.words, model.body_[0], model.body_[3].up):
        part.requires_grad_(False)
    return model


def loss_inside() -> nn.Module:
    def body(m: Of, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in m.blocks:
            x = block(x)
        logits = m.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return Of(body, blocks=blocks(), head=nn.Linear(WIDTH, 3))


def sequential() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def config(name: str, **changes: Any) -> Any:
    import transformers

    small = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **changes}
    return getattr(transformers, name)(**small)


def language_model(name: str, **changes: Any) -> Callable[[], nn.Module]:
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, f"{name}ForCausalLM")(config(f"{name}Config", **small, **changes))

    return make


def gpt2() -> nn.Module:
    import transformers

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(config("GPT2Config", n_layer=6, n_embd=16, n_head=2, n_positions=32, **off))


def bert() -> nn.Module:
    import transformers

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2}
    return transformers.BertForTokenClassification(config("BertConfig", max_position_embeddings=32, **small, **off))


def t5() -> nn.Module:
    import transformers

    small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        config("T5Config", dropout_rate=0.0, decoder_start_token_id=0, **small)
    )


def vit() -> nn.Module:
    import transformers

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2}
    made = transformers.ViTConfig(image_size=8, patch_size=2, num_labels=3, **small, **off)
    return transformers.ViTForImageClassification(made)


def masked(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": words(rows, length), "attention_mask": padded(rows, length)}


def both_ends(rows: int, length: int) -> dict[str, Tensor]:
    back = {"decoder_input_ids": words(rows, length - 1), "decoder_attention_mask": padded(rows, length - 1)}
    return masked(rows, length) | back


def many_inputs(rows: int, length: int) -> dict[str, Any]:
    others = {"b": floats(rows, length, WIDTH), "label": "b"}
    return {"a": floats(rows, length, WIDTH), "others": others, "times": 2, "how": "add", "bias": None}


def rows_of_floats(rows: int, length: int) -> Tensor:
    return floats(rows, length, WIDTH)


def named(start: int, *more: int, prefix: str = "blocks") -> tuple[str, ...]:
    return tuple(f"{prefix}.{at}" for at in (start, *more))


ZOO: dict[str, Animal] = {
    "sequential": Animal(sequential, lambda n, t: floats(n, WIDTH), ("3", "6", "9")),
    "resnet": Animal(ResNet, lambda n, t: floats(n, 3, t, t), ("layers.1", "layers.2", "layers.4"), by_parts=True),
    "unet": Animal(UNet, lambda n, t: floats(n, 3, t, t), ("down.2", "up.2", "up.1")),
    "lstm": Animal(Recurrent, words, ("one", "two", "head")),
    "many inputs": Animal(ManyInputs, many_inputs, named(1, 2, 3)),
    "dicts": Animal(DictInDictOut, lambda n, t: ({"ids": words(n, t), "mask": padded(n, t)},), named(1, 2, 3)),
    "dataclass": Animal(chain_of(lambda out, middle: Answer(out, middle)), rows_of_floats, named(1, 2, 4)),
    "named tuple": Animal(chain_of(lambda out, middle: Pair(out, Pair(middle, 3))), rows_of_floats, named(1, 2, 4)),
    "tuple": Animal(chain_of(lambda out, middle: (out, None, [middle])), rows_of_floats, named(1, 2, 4)),
    "used twice": Animal(twice, rows_of_floats, named(1, 2, 3)),
    "tied": Animal(tied, words, named(1, 2, 5)),
    "glue": Animal(glue, words, named(1, 2, 5)),
    "frozen": Animal(frozen, words, named(1, 2, 5, prefix="body_")),
    "loss inside": Animal(loss_inside, lambda n, t: (floats(n, WIDTH), torch.randint(0, 3, (n,))), named(1, 2, 5)),
    "gpt2": Animal(gpt2, words, named(1, 2, 5, prefix="transformer.h"), transformers=True),
    "bert": Animal(bert, masked, named(1, 2, 5, prefix="bert.encoder.layer"), transformers=True),
    "llama": Animal(language_model("Llama"), masked, named(1, 2, 5, prefix="model.layers"), transformers=True),
    "mixtral": Animal(
        language_model("Mixtral", num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager"),
        words,
        named(1, 2, 5, prefix="model.layers"),
        transformers=True,
    ),
    "t5": Animal(t5, both_ends, ("encoder.block.1", "decoder.block.0", "decoder.block.2"), transformers=True),
    "vit": Animal(
        vit,
        lambda n, t: {"pixel_values": floats(n, 3, 2 * t, 2 * t), "interpolate_pos_encoding": True},
        named(1, 2, 5, prefix="vit.layers"),
        transformers=True,
    ),
}


def born(name: str) -> nn.Module:
    torch.manual_seed(11)
    return ZOO[name].make().double()
