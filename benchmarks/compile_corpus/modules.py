"""Small modules as people write them, each with inputs that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.compile_corpus.programs import Inputs, Mlp, normal, whole

D, HEADS, LENGTH, WORDS = 16, 2, 8, 32


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attention(nn.Module):
    """Attends by one of several ways of writing it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.lift, self.out = way, nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, D // HEADS)
        query, key, value = (each.view(shape).transpose(1, 2) for each in self.lift(x).chunk(3, -1))
        if self.way == "rotated":
            query, key = self.rotated(query), self.rotated(key)
        if self.way in ("fused", "rotated"):
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(D // HEADS)
            if self.way == "sloped":
                place = torch.arange(x.shape[1], device=x.device)
                scores = scores - 0.1 * (place[:, None] - place[None]).abs()
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(value.dtype) @ value
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        place = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        angle = place[:, None] * torch.pow(100.0, -torch.arange(half, device=x.device, dtype=x.dtype) / half)
        left, right = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(D, 32), nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Weighs experts by a router, all of them or the best two."""

    def __init__(self, best: int) -> None:
        super().__init__()
        self.best, self.router = best, nn.Linear(D, 4)
        self.experts = nn.ModuleList(Mlp(D, 32, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.best:
            top, which = weights.topk(self.best, -1)
            weights = torch.zeros_like(weights).scatter(-1, which, top / top.sum(-1, keepdim=True))
        return sum(weights[..., index, None] * expert(x) for index, expert in enumerate(self.experts))


class Language(nn.Module):
    def __init__(self, tied: bool = False, recomputed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Parameter(0.02 * torch.randn(LENGTH, D))
        self.blocks = nn.ModuleList(
            Residual(Chain(nn.LayerNorm(D), Attention("fused")), Chain(Rms(), Gated(), nn.Dropout(dropout)))
            for _ in range(2)
        )
        self.recomputed, self.head = recomputed, nn.Linear(D, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(x)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, 3, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.norm(self.down(x)))
        return self.last(torch.cat([x, self.up(hidden + self.deep(hidden))], 1))


class Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.last = nn.Linear(D, 8), nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lift(x)
        which = torch.cdist(hidden, self.codes.to(hidden.dtype)).argmin(-1)
        if self.training:
            with torch.no_grad():
                hot = functional.one_hot(which, 12).to(self.codes.dtype)
                means = hot.t() @ hidden.to(self.codes.dtype) / hot.sum(0).clamp(min=1).unsqueeze(1)
                self.codes.lerp_(means, 0.05)
        return self.last(hidden + (self.codes[which].to(hidden.dtype) - hidden).detach())


class Graph(nn.Module):
    """Passes messages along fixed edges."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("edges", torch.randint(8, (2, 24), generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        sent = self.other(x)[self.edges[0]]
        return torch.relu(self.own(x)).index_add(0, self.edges[1], sent.to(x.dtype))


class Stochastic(nn.Module):
    """Leaves out blocks of samples at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(D, 32, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            kept = torch.full((x.shape[0], 1), 0.7, dtype=x.dtype, device=x.device)
            x = x + block(x) * (torch.bernoulli(kept) / 0.7 if self.training else 1)
        return x


class Broken(Mlp):
    """Breaks its graph in the middle, which is allowed."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(hidden)


class Deciding(Mlp):
    """Takes one of two equal ways, by its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) if float(x.sum()) > -1e9 else x[:, :8]


def image(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Chain(*(layer() for layer in layers))


def _conv(*arguments: Any, **named: Any) -> Callable[[], nn.Module]:
    return partial(nn.Conv2d, *arguments, **named)


ROWS, SEQUENCE, IMAGE, TOKENS = normal(8, D), normal(4, LENGTH, D), normal(4, 3, 8, 8), whole(WORDS, 4, LENGTH)
MODULES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "perceptron": (Mlp, ROWS),
    "deep": (lambda: Chain(*(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(6))), ROWS),
    "sequential": (lambda: nn.Sequential(nn.Linear(D, 32), nn.SiLU(), nn.Linear(32, 8)), ROWS),
    "linear": (lambda: nn.Linear(D, 8), ROWS),
    "residual": (lambda: Residual(Mlp(D, 32, D), Mlp(D, 32, D)), ROWS),
    "layer_norm": (lambda: Chain(nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, 8)), ROWS),
    "batch_norm": (lambda: Chain(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Linear(D, 8)), ROWS),
    "rms_norm": (lambda: Chain(Rms(), Gated(), Rms()), ROWS),
    "weight_norm": (lambda: Chain(nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), nn.Linear(D, 8)), ROWS),
    "prelu": (lambda: Chain(nn.Linear(D, D), nn.PReLU(), nn.Linear(D, 8), nn.Hardswish()), ROWS),
    "mish": (lambda: Chain(nn.Linear(D, D), nn.Mish(), nn.Linear(D, 8), nn.LogSoftmax(-1)), ROWS),
    "glu": (lambda: Chain(nn.Linear(D, 32), nn.GLU(), nn.Linear(D, 8), nn.Softplus()), ROWS),
    "experts": (lambda: Experts(0), ROWS),
    "two_experts": (lambda: Experts(2), ROWS),
    "graph": (Graph, ROWS),
    "broken": (Broken, ROWS),
    "deciding": (Deciding, ROWS),
    "convolution": (image(_conv(3, 8, 3, padding=1), nn.ReLU, _conv(8, 4, 3, stride=2)), IMAGE),
    "convolution_norm": (
        image(_conv(3, 8, 3, padding=1), lambda: nn.BatchNorm2d(8), nn.ReLU, _conv(8, 4, 3), lambda: nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "depthwise": (image(_conv(3, 6, 1), _conv(6, 6, 3, groups=6), nn.GELU, _conv(6, 3, 1)), IMAGE),
    "pooled": (image(_conv(3, 8, 3), nn.ReLU, lambda: nn.MaxPool2d(2), lambda: nn.AdaptiveAvgPool2d(1)), IMAGE),
    "average": (image(_conv(3, 8, 3, padding=1), nn.Tanh, lambda: nn.AvgPool2d(2)), IMAGE),
    "shuffled": (
        image(_conv(3, 12, 3, padding=1), lambda: nn.PixelShuffle(2), lambda: nn.Upsample(scale_factor=0.5)),
        IMAGE,
    ),
    "unet": (Unet, IMAGE),
    "attention": (lambda: Attention("fused"), SEQUENCE),
    "attention_by_hand": (lambda: Attention("plain"), SEQUENCE),
    "attention_sloped": (lambda: Attention("sloped"), SEQUENCE),
    "attention_rotated": (lambda: Attention("rotated"), SEQUENCE),
    "encoder": (lambda: nn.TransformerEncoderLayer(D, HEADS, 32, dropout=0.0, batch_first=True), SEQUENCE),
    "language": (Language, TOKENS),
    "language_tied": (lambda: Language(tied=True), TOKENS),
    "language_recomputed": (lambda: Language(recomputed=True), TOKENS),
    "bag": (lambda: Chain(nn.EmbeddingBag(WORDS, D), Mlp()), TOKENS),
}


@torch.library.custom_op("corpus::shorten_", mutates_args=("rows",))
def shorten_(rows: Tensor) -> None:
    """Make each row no longer than 1."""
    rows.div_(rows.norm(dim=-1, keepdim=True).clamp_min(1.0))


@shorten_.register_fake
def _(rows: Tensor) -> None:
    return None


class Shortening(nn.Module):
    """Before each forward an operator of its own changes a view of a parameter: every other row."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(D, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shorten_(self.lift.weight[::2])
        return self.out(torch.relu(self.lift(x)))


TRAINED: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "dropout": (lambda: Chain(nn.Linear(D, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 8)), ROWS),
    "dropout_2d": (image(_conv(3, 8, 3), lambda: nn.Dropout2d(0.3), nn.ReLU, _conv(8, 4, 3)), IMAGE),
    "stochastic_depth": (Stochastic, ROWS),
    "language_dropout": (lambda: Language(dropout=0.2), TOKENS),
    "checkpoint_dropout": (lambda: Language(dropout=0.2, recomputed=True), TOKENS),
    "quantizer": (Quantizer, ROWS),
    "shortening": (Shortening, ROWS),
}
IN_BF16 = (
    "perceptron", "deep", "layer_norm", "rms_norm", "experts", "convolution", "depthwise", "attention", "encoder",
    "attention_by_hand", "language", "language_recomputed", "unet",
)  # fmt: skip
