"""Small networks for images, in the shapes that image libraries have them: chains, branches, skips, several heads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 2


def conv(
    a: int, b: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU
) -> nn.Module:
    layers = [
        nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(b),
        act(inplace=True),
    ]
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """Features, pooled, and a linear layer."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features, self.pool, self.head = features, nn.AdaptiveAvgPool2d(1), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


class Bottleneck(nn.Module):
    def __init__(self, a: int, b: int, stride: int = 1, groups: int = 1, expansion: int = 2) -> None:
        super().__init__()
        self.one, self.two = conv(a, b, 1), conv(b, b, 3, stride, groups)
        self.three, self.norm = nn.Conv2d(b, b * expansion, 1, bias=False), nn.BatchNorm2d(b * expansion)
        same = stride == 1 and a == b * expansion
        self.short = (
            None if same else nn.Sequential(nn.Conv2d(a, b * expansion, 1, stride), nn.BatchNorm2d(b * expansion))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.short is None else self.short(x)
        x = self.norm(self.three(self.two(self.one(x))))
        x += identity
        return self.relu(x)


def resnet(groups: int = 1) -> nn.Module:
    stem = nn.Sequential(conv(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1))
    layers = [
        nn.Sequential(Bottleneck(a, b, stride, groups), Bottleneck(2 * b, b, 1, groups))
        for a, b, stride in ((8, 8, 1), (16, 12, 2), (24, 16, 2))
    ]
    return Classifier(nn.Sequential(stem, *layers), 32)


class Dense(nn.Module):
    """Every layer takes all before it."""

    def __init__(self, width: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(True), nn.Conv2d(a, growth, 3, padding=1, bias=False))
            for a in range(width, width + growth * count, growth)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet() -> nn.Module:
    def narrow(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(True), nn.Conv2d(a, b, 1, bias=False), nn.AvgPool2d(2))

    parts = [conv(3, 8, 3, 2), Dense(8, 4, 3), narrow(20, 8), Dense(8, 4, 3), narrow(20, 8), Dense(8, 4, 3)]
    return Classifier(nn.Sequential(*parts), 20)


class UNet(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (3, 4, 6, 8), *, transposed: bool = True) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in pairwise(sizes))
        self.middle = conv(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, a, 2, 2) if transposed else nn.Upsample(scale_factor=2, mode="bilinear")
            for a in sizes[1:]
        )
        self.join = nn.ModuleList(conv(2 * b, max(a, 4)) for a, b in pairwise(sizes))
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class Inception(nn.Module):
    def __init__(self, a: int) -> None:
        super().__init__()
        self.one, self.three = conv(a, 4, 1), nn.Sequential(conv(a, 4, 1), conv(4, 4, 3))
        self.five, self.pooled = (
            nn.Sequential(conv(a, 2, 1), conv(2, 4, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(a, 4, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class GoogLeNet(nn.Module):
    """Helping classifiers in between while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, 3, 2)
        self.a, self.b, self.c, self.d = Inception(8), Inception(16), Inception(16), Inception(16)
        self.help_one, self.help_two, self.main = (Classifier(nn.Identity(), 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.a(self.stem(x))
        one = self.help_one(x) if self.training else None
        x = self.c(self.b(x))
        two = self.help_two(x) if self.training else None
        x = self.main(self.d(x))
        return x if one is None or two is None else (x, one, two)


def vgg(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((3, 8), (8, 8), (8, 12), (12, 12), (12, 16)):
        layers += [nn.Conv2d(a, b, 3, padding=1), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if b != a else []
    head = [nn.Flatten(), nn.Linear(16 * 16, 24), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(24, CLASSES)]
    return nn.Sequential(*layers, *head)


def alexnet() -> nn.Module:
    features = [
        nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(inplace=True), nn.LocalResponseNorm(3), nn.MaxPool2d(3, 2),
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((2, 2)),
    ]  # fmt: skip
    return nn.Sequential(
        *features, nn.Flatten(), nn.Dropout(0.0), nn.Linear(48, 24), nn.ReLU(True), nn.Linear(24, CLASSES)
    )


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.less, self.more = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.more(F.relu(self.less(F.adaptive_avg_pool2d(x, 1)), inplace=True)))


class Inverted(nn.Module):
    def __init__(self, a: int, b: int, stride: int, act: type[nn.Module], squeeze: bool) -> None:
        super().__init__()
        parts = [conv(a, 2 * a, 1, act=act), conv(2 * a, 2 * a, 3, stride, 2 * a, act=act)]
        parts += [Squeeze(2 * a)] if squeeze else []
        self.body = nn.Sequential(*parts, nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b))
        self.skips = stride == 1 and a == b

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skips else self.body(x)


def mobilenet(act: type[nn.Module] = nn.ReLU6, squeeze: bool = False) -> nn.Module:
    shapes = ((8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 16, 2), (16, 16, 1))
    return Classifier(nn.Sequential(conv(3, 8, 3, 2, act=act), *(Inverted(*one, act, squeeze) for one in shapes)), 16)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    narrower = nn.Sequential(LayerNorm2d(8), nn.Conv2d(8, 12, 2, 2))
    blocks = [ConvNeXt(8), ConvNeXt(8), narrower, ConvNeXt(12), ConvNeXt(12)]
    return Classifier(nn.Sequential(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8), *blocks), 12)


class ViT(nn.Module):
    """By torch's own encoder layers, a class token and positions."""

    def __init__(self, width: int = 16, side: int = 4) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, side * side + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 24, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Window(nn.Module):
    """Attention within windows, shifted in every other layer."""

    def __init__(self, width: int, shift: int, size: int = 4) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.shift, self.size = shift, size

    def forward(self, x: Tensor) -> Tensor:
        rows, height, _, width = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = (
            y.unflatten(1, (-1, self.size))
            .unflatten(3, (-1, self.size))
            .transpose(2, 3)
            .reshape(-1, self.size**2, width)
        )
        y = self.attention(y, y, y, need_weights=False)[0]
        y = y.view(rows, height // self.size, -1, self.size, self.size, width).transpose(2, 3).reshape(x.shape)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(x)


class Swin(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, CLASSES)
        self.blocks = nn.Sequential(*(Window(width, 2 * (at % 2)) for at in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))


class Shuffle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv(width // 2, width // 2, 1), conv(width // 2, width // 2, 3, 1, width // 2))

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        x = torch.cat((one, self.branch(two)), 1)
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def shufflenet() -> nn.Module:
    blocks = [Shuffle(8), Shuffle(8), conv(8, 12, 3, 2), Shuffle(12), Shuffle(12)]
    return Classifier(nn.Sequential(conv(3, 8, 3, 2), *blocks), 12)


class Fire(nn.Module):
    def __init__(self, a: int) -> None:
        super().__init__()
        self.less, self.one, self.three = nn.Conv2d(a, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.less(x))
        return torch.cat([self.act(self.one(x)), self.act(self.three(x))], 1)


def squeezenet() -> nn.Module:
    fires = [Fire(8), Fire(8), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(8), Fire(8)]
    return Classifier(nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(True), *fires), 8)


class DeepLab(nn.Module):
    """Dilated branches beside a pooled one, and a second head from the middle, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (
            nn.Sequential(conv(3, 8, 3, 2), conv(8, 8)),
            nn.Sequential(conv(8, 12, 3, 2), conv(12, 12)),
        )
        self.branches = nn.ModuleList(nn.Conv2d(12, 4, 3, padding=rate, dilation=rate) for rate in (1, 2, 3))
        self.pooled, self.project = nn.Conv2d(12, 4, 1), conv(16, 8, 1)
        self.head, self.helper = nn.Conv2d(16, CLASSES, 1), nn.Conv2d(12, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.low(x)
        high = self.high(low)
        parts = [branch(high) for branch in self.branches]
        parts.append(F.adaptive_avg_pool2d(self.pooled(high), 1).expand_as(parts[0]))
        y = F.interpolate(self.project(torch.cat(parts, 1)), low.shape[-2:], mode="bilinear")
        full = self.head(torch.cat([y, low], 1))
        return {"out": F.interpolate(full, x.shape[-2:]), "aux": F.interpolate(self.helper(high), x.shape[-2:])}


class Pyramid(nn.Module):
    """A feature pyramid: levels go down again and are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Sequential(conv(a, b, 3, 2), conv(b, b)) for a, b in pairwise((3, 6, 8, 10)))
        self.side = nn.ModuleList(nn.Conv2d(b, 6, 1) for b in (6, 8, 10))
        self.smooth = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = {}
        for at, level in enumerate(self.levels):
            x = features[str(at)] = level(x)
        y, out = self.side[2](x), []
        for at in (1, 0):
            out.append(self.head(self.smooth[at + 1](y)))
            y = self.side[at](features[str(at)]) + F.interpolate(y, features[str(at)].shape[-2:])
        out.append(self.head(self.smooth[0](y)))
        return torch.stack([one.mean((2, 3)) for one in out]).sum(0)


class Mixer(nn.Module):
    def __init__(self, width: int = 12, count: int = 16) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 8, 8), nn.Linear(width, CLASSES)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.across = nn.ModuleList(nn.Linear(count, count) for _ in range(4))
        self.along = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for norm, across, along in zip(self.norms, self.across, self.along, strict=True):
            x = x + across(norm(x).mT).mT
            x = x + F.gelu(along(x))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """Columns of features read by an LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(conv(3, 6, 3, 2), conv(6, 8, 3, 2))
        self.one, self.two = nn.LSTM(64, 12, bidirectional=True, batch_first=True), nn.GRU(24, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.one(self.features(x).flatten(1, 2).mT)
        x, last = self.two(x)
        return self.head(x.mean(1) + last[-1])


NETS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": alexnet,
    "vgg": lambda: vgg(False),
    "vgg with batch normalisation": lambda: vgg(True),
    "resnet": resnet,
    "resnext": lambda: resnet(2),
    "densenet": densenet,
    "inception": GoogLeNet,
    "mobilenet": mobilenet,
    "mobilenet with squeezes": lambda: mobilenet(nn.Hardswish, True),
    "efficientnet": lambda: mobilenet(nn.SiLU, True),
    "shufflenet": shufflenet,
    "squeezenet": squeezenet,
    "convnext": convnext,
    "vit": ViT,
    "swin": Swin,
    "mlp-mixer": Mixer,
    "u-net": UNet,
    "u-net by upsampling": lambda: UNet(transposed=False),
    "deeplab": DeepLab,
    "feature pyramid": Pyramid,
    "convolutions, then lstm and gru": Recurrent,
}
FIXED = ("vgg", "vgg with batch normalisation", "vit", "mlp-mixer", "convolutions, then lstm and gru")  # one image size
