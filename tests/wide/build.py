"""One family as a tiny model with random weights, three batches in two shapes, and its loss."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from changes import CHANGES, SINGLE
from families import Family, config_class, families
from nets import FIXED, NETS
from shrink import WIDTH, WORDS, tiny
from torch import Tensor, nn

ROWS, PARTS, CLASSES, IGNORED = 4, 2, 2, -100
Loss = Callable[[Any, Tensor], Tensor]


@dataclass
class Case:
    model: nn.Module
    batches: list[tuple[Any, Tensor]]
    loss: Loss
    mean: Callable[[Tensor], float]  # how many items a target has, which the loss is the mean of


def build(name: str) -> Case:
    """The entry of this name: a family of transformers, or a net of ours."""
    kind, _, rest = name.partition(" ")
    return net(rest) if kind == "net" else of_transformers(families()[name])


def names() -> list[str]:
    return [*(f"net {name}" for name in NETS), *families()]


def net(name: str) -> Case:
    """Images of two sizes where the net takes any, and of two numbers of rows."""
    model, batches = NETS[name]().double().train(), []
    for rows, side in ((ROWS, 32), (ROWS + 2, 32 if name in FIXED else 48), (ROWS, 32)):
        inputs = torch.randn(rows, 3, side, side, dtype=torch.float64)
        batches.append((inputs, torch.randint(0, CLASSES, (rows,))))
    return Case(model, batches, net_loss, _rows)


def net_loss(out: Any, target: Tensor) -> Tensor:
    """Of every head: classes of rows, or of all pixels of rows."""
    outs = out if isinstance(out, tuple) else tuple(out.values()) if isinstance(out, dict) else (out,)
    losses = [F.cross_entropy(one.flatten(2).mean(2) if one.dim() == 4 else one, target) for one in outs]
    return torch.stack([loss * weight for loss, weight in zip(losses, (1.0, 0.3, 0.3), strict=False)]).sum()


def of_transformers(family: Family) -> Case:
    kind = model_class(family)
    config = tiny(kind.config_class or config_class(family.name), CHANGES.get(family.name, {}))
    for one in (config, *(getattr(config, name, None) for name in kind.config_class.sub_configs)):
        if one is not None:
            one._experts_implementation = "eager"  # the default has no float64
    if family.name in SINGLE:
        torch.set_default_dtype(torch.float32)
    model = kind(config).to(torch.get_default_dtype()).train()
    for module in model.modules():
        if "Dropout" in type(module).__name__ and isinstance(getattr(module, "p", None), float):
            module.p = 0.0
    return KINDS[family.kind](model, config)


def model_class(family: Family) -> Any:
    import transformers

    given = getattr(transformers, family.model, None)
    if given is not None:
        return given
    package = config_class(family.name).__module__.rsplit(".", 1)[0]
    return getattr(importlib.import_module(f"{package}.modeling_{package.rsplit('.', 1)[1]}"), family.model)


def taken(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


# -- words ------------------------------------------------------------------------------------------------------------


def padded(rows: int, length: int, cuts: tuple[int, ...]) -> Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, cut in enumerate(cuts):
        mask[row, length - cut :] = 0
    return mask


SHAPES = ((10, (0, 0, 0, 0)), (14, (0, 3, 6, 1)), (10, (4, 0, 2, 5)))  # length, and padding of each row


def text(model: nn.Module, config: Any) -> Case:
    words = min(WORDS, int(_of_text(config, "vocab_size", WORDS)))
    batches = []
    streams = config.num_codebooks if "musicgen" in config.model_type else 1  # each a row of its own
    for length, cuts in SHAPES:
        cuts = tuple(cut for cut in cuts for _ in range(streams))
        mask, ids = padded(len(cuts), length, cuts), torch.randint(6, words, (len(cuts), length))
        inputs: dict[str, Any] = {"input_ids": ids * mask}
        if taken(model, "attention_mask") and streams == 1:
            inputs["attention_mask"] = mask
        if taken(model, "decoder_input_ids"):
            inputs["decoder_input_ids"] = torch.randint(6, words, (ROWS, length - 2))
            mask = mask[:, : length - 2]
        target = torch.randint(6, words, mask.shape).masked_fill(mask == 0, IGNORED)
        batches.append((inputs, target))
    return Case(model, batches, token_loss, lambda target: float((target != IGNORED).sum()))


def _of_text(config: Any, name: str, otherwise: Any) -> Any:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(inner, name, getattr(config, name, otherwise))


def token_loss(out: Any, target: Tensor) -> Tensor:
    logits = _logits(out)[:, : target.shape[1]]  # some give as many as there are positions
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _logits(out: Any) -> Tensor:
    for name in ("logits", "prediction_logits", "lm_logits"):
        found = getattr(out, name, None)
        if isinstance(found, Tensor):
            return found
    return out if isinstance(out, Tensor) else out[0]


def _rows(target: Tensor) -> float:
    return float(len(target))


# -- images and sound -------------------------------------------------------------------------------------------------


def images(model: nn.Module, config: Any) -> Case:
    """Rows differ between batches; and the size of images, where that is open."""
    batches = []
    many = 3 * ROWS if config.model_type == "levit" else ROWS  # batch norm of two rows alone gives their signs
    for rows in (many, many + 2, many):
        batches.append((_pictures(model, config, rows), torch.randint(0, CLASSES, (rows,))))
    return Case(model, batches, class_loss, _rows)


def _pictures(model: nn.Module, config: Any, rows: int) -> dict[str, Any]:
    if taken(model, "spatial_shapes"):  # patches in a row, some of them padding
        patches = torch.randn(rows, 16, 3 * config.vision_config.patch_size**2, dtype=torch.float64)
        mask = padded(rows, 16, tuple(4 * (row % 2) for row in range(rows)))
        shapes = torch.tensor([[4 - row % 2, 4] for row in range(rows)])
        return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    if not taken(model, "pixel_values"):  # pixels as words
        return {"input_ids": torch.randint(0, config.vocab_size, (rows, 16))}
    return {"pixel_values": torch.randn(rows, *_picture(config), dtype=torch.float64)}


def _picture(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    return (getattr(vision, "num_channels", 3), *size)


def class_loss(out: Any, target: Tensor) -> Tensor:
    logits = _logits(out)
    return F.cross_entropy(logits if logits.dim() == 2 else logits.mean(1), target)


def segments(model: nn.Module, config: Any) -> Case:
    case = images(model, config)
    batches = [
        (inputs, torch.randint(0, CLASSES, (len(target), *inputs["pixel_values"].shape[-2:])))
        for inputs, target in case.batches
    ]
    return Case(model, batches, pixel_loss, lambda target: float(target.numel()))


def pixel_loss(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(F.interpolate(_logits(out), target.shape[-2:], mode="nearest"), target)


def depths(model: nn.Module, config: Any) -> Case:
    case = images(model, config)
    return Case(model, [(inputs, target.double()) for inputs, target in case.batches], depth_loss, _rows)


def depth_loss(out: Any, target: Tensor) -> Tensor:
    depth = out.predicted_depth
    return (depth.flatten(1).mean(1) - target).square().mean()


def videos(model: nn.Module, config: Any) -> Case:
    batches = []
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 2)
    name = "pixel_values_videos" if taken(model, "pixel_values_videos") else "pixel_values"
    for rows in (ROWS, ROWS + 2, ROWS):
        size = _picture(config)
        batches.append(
            ({name: torch.randn(rows, frames, *size, dtype=torch.float64)}, torch.randint(0, CLASSES, (rows,)))
        )
    return Case(model, batches, class_loss, _rows)


MELS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")


def _sounds(model: nn.Module, config: Any, rows: int, length: int, cuts: tuple[int, ...]) -> dict[str, Any]:
    name = "input_values" if taken(model, "input_values") else "input_features"
    if name == "input_values" and (hasattr(config, "conv_dim") or not hasattr(config, "num_mel_bins")):
        shape: tuple[int, ...] = (rows, 100 * length)
        mask = padded(rows, 100 * length, tuple(100 * cut for cut in cuts))
    else:
        mels = next((getattr(config, one) for one in MELS if getattr(config, one, None)), 16)
        mels = {"pop2piano": WIDTH, "granite_speech5_ctc": 4 * mels}.get(config.model_type, mels)
        if config.model_type == "whisper":  # of one length, channels first
            return {name: torch.randn(rows, mels, 2 * config.max_source_positions, dtype=torch.float64)}
        shape, mask = (rows, 4 * length, mels), padded(rows, 4 * length, tuple(4 * cut for cut in cuts))
    sound = torch.randn(shape, dtype=torch.float64)
    inputs: dict[str, Any] = {name: sound * mask.reshape(mask.shape + (1,) * (sound.dim() - 2))}
    if taken(model, "attention_mask"):
        inputs["attention_mask"] = mask
    return inputs


LETTERS = 3


def letters(model: nn.Module, config: Any) -> Case:
    """Sounds of two lengths, padded, and the few letters of each."""
    batches = []
    for length, cuts in SHAPES:
        inputs = _sounds(model, config, ROWS, 2 * length, cuts)
        batches.append((inputs, torch.randint(1, 20, (ROWS, LETTERS))))
    return Case(model, batches, letter_loss, _rows)


def letter_loss(out: Any, target: Tensor) -> Tensor:
    logits = _logits(out).log_softmax(-1).transpose(0, 1)
    times, counts = [torch.full((len(target),), some, dtype=torch.long) for some in (len(logits), target.shape[1])]
    return F.ctc_loss(logits, target, times, counts)


def sounds(model: nn.Module, config: Any) -> Case:
    batches = []
    for rows in (ROWS, ROWS + 2, ROWS):
        shape = (rows, getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 16))
        batches.append(({"input_values": torch.randn(shape, dtype=torch.float64)}, torch.randint(0, CLASSES, (rows,))))
    return Case(model, batches, class_loss, _rows)


def speech(model: nn.Module, config: Any) -> Case:
    """Sounds in, words out."""
    batches = []
    for length, cuts in SHAPES:
        inputs = _sounds(model, config, ROWS, length, cuts)
        ids = torch.randint(6, WORDS - 1, (ROWS, length - 2))
        inputs["decoder_input_ids"] = ids
        mask = padded(ROWS, length - 2, tuple(min(cut, 3) for cut in cuts))
        batches.append((inputs, torch.randint(6, WORDS - 1, mask.shape).masked_fill(mask == 0, IGNORED)))
    return Case(model, batches, token_loss, lambda target: float((target != IGNORED).sum()))


KINDS: dict[str, Callable[[nn.Module, Any], Case]] = {
    "masked": text, "seq2seq": text, "causal": text, "images": images, "segments": segments, "depths": depths,
    "videos": videos, "letters": letters, "sounds": sounds, "speech": speech,
}  # fmt: skip
