"""Modules that have every operator between two layers, all operators of a group together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from nets import prepared, redraw
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.network import Network

Build = Callable[["Operator", Tensor], Tensor]


class Operator(nn.Module):
    """``last(build(first(x)))`` of ``(batch, 6)``; ``build`` gets ``(batch, 16)``."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        self.first, self.second = nn.Linear(6, 16), nn.Linear(6, 16)
        self.image, self.grouped = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 2, stride=2, groups=2)
        self.line, self.dilated = nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Conv1d(2, 3, 2, dilation=3, bias=False)
        self.up, self.uneven = nn.ConvTranspose2d(1, 2, 2, stride=2), nn.ConvTranspose1d(2, 3, 3, 2, 1, 1, groups=1)
        self.batch_norm = nn.BatchNorm2d(1)
        self.layer_norm, self.rms_norm = nn.LayerNorm(16), nn.RMSNorm(16)
        self.vector = nn.Parameter(torch.empty(16))
        redraw(self, torch.Generator().manual_seed(11), scale=1.0)
        generator = torch.Generator().manual_seed(12)
        mean, variance = self.batch_norm.running_mean, self.batch_norm.running_var
        assert mean is not None
        assert variance is not None
        mean.normal_(generator=generator)
        variance.uniform_(0.5, 2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.build(self, x)


def picture(m: Operator, x: Tensor) -> Tensor:
    return m.first(x).view(-1, 1, 4, 4)


def positive(m: Operator, x: Tensor) -> Tensor:
    return torch.exp(m.first(x) / 4) + 0.1


def attention(m: Operator, x: Tensor) -> Tensor:
    q, k = m.first(x).view(-1, 2, 4, 2), m.second(x).view(-1, 2, 4, 2)
    return torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1) @ k


def heads(m: Operator, x: Tensor) -> Tensor:
    return m.first(x).view(-1, 2, 4, 2)


INDEX = torch.tensor([3, 0, 3, 15])


MASK = torch.tensor([True, False] * 8)


LINEAR: dict[str, Build] = {
    "conv2d": lambda m, x: m.image(picture(m, x)),
    "conv2d with groups and stride": lambda m, x: m.grouped(m.image(picture(m, x))),
    "conv1d with stride": lambda m, x: m.line(m.first(x).view(-1, 2, 8)),
    "dilated conv1d without bias": lambda m, x: m.dilated(m.first(x).view(-1, 2, 8)),
    "transposed conv2d": lambda m, x: m.up(picture(m, x)),
    "transposed conv1d with padding": lambda m, x: m.uneven(m.first(x).view(-1, 2, 8)),
    "transposed conv1d with more outputs": lambda m, x: functional.conv_transpose1d(
        m.first(x).view(-1, 2, 8), m.vector[:2].view(2, 1, 1), output_padding=1, groups=2, dilation=2
    ),
    "batch norm": lambda m, x: m.batch_norm(picture(m, x)),
    "average pool": lambda m, x: functional.avg_pool2d(picture(m, x), 2),
    "average pool with padding": lambda m, x: functional.avg_pool2d(picture(m, x), 3, 2, 1),
    "global average": lambda m, x: functional.adaptive_avg_pool2d(m.image(picture(m, x)), 1).flatten(1),
    "sum": lambda m, x: picture(m, x).sum(dim=(1, 3)),
    "mean": lambda m, x: picture(m, x).mean(dim=-1, keepdim=True),
    "index": lambda m, x: torch.index_select(m.first(x), 1, INDEX),
    "element": lambda m, x: picture(m, x)[:, 0, -1],
    "split": lambda m, x: torch.cat(torch.split(m.first(x), [5, 11], dim=1)[::-1], dim=1),
    "zero padding": lambda m, x: functional.pad(picture(m, x), (1, 0, 2, 1)),
    "padding with a value, and cropping": lambda m, x: functional.pad(picture(m, x), (1, -1, 0, 2), value=1.5),
    "concatenation with a constant": lambda m, x: torch.cat([m.vector.expand(x.shape[0], 16), m.first(x)], dim=1),
    "choice by a mask": lambda m, x: torch.where(MASK, m.first(x), m.second(x)),
    "choice of a constant": lambda m, x: torch.where(MASK, m.first(x), m.vector),
    "matrices by dimension": lambda m, x: m.first(x).view(-1, 2, 2, 4) @ m.vector.view(2, 4, 2),
    "average pool with a part window": lambda m, x: functional.avg_pool2d(picture(m, x), 3, 2, 1, ceil_mode=True),
    "average pool that does not count padding": lambda m, x: functional.avg_pool2d(
        picture(m, x), 3, 2, 1, count_include_pad=False
    ),
    "averages of uneven windows": lambda m, x: functional.adaptive_avg_pool2d(picture(m, x), 3),
    "nearest neighbours": lambda m, x: functional.interpolate(picture(m, x), scale_factor=2),
    "nearest neighbours at the edges of steps": lambda m, x: functional.interpolate(
        m.first(x).view(-1, 1, 16), scale_factor=2.6
    ),
    "averages without channels": lambda m, x: functional.adaptive_avg_pool1d(m.first(x), 5),
    "bilinear resampling": lambda m, x: functional.interpolate(picture(m, x), size=(3, 7), mode="bilinear"),
    "bilinear resampling of corners": lambda m, x: functional.interpolate(
        picture(m, x), scale_factor=2, mode="bilinear", align_corners=True
    ),
    "reflection": lambda m, x: functional.pad(picture(m, x), (1, 2, 3, 0), mode="reflect"),
    "replication": lambda m, x: functional.pad(picture(m, x), (1, 2, 3, 0), mode="replicate"),
    "circular padding": lambda m, x: functional.pad(picture(m, x), (1, 2, 3, 0), mode="circular"),
    "flip and roll": lambda m, x: m.first(x).flip(1).roll(3, 1),
    "repetition": lambda m, x: m.first(x)[:, :3].repeat(1, 2),
    "running sum": lambda m, x: picture(m, x).cumsum(2),
    "pairs of indices": lambda m, x: picture(m, x)[:, :, [0, 3, 1], [2, -1, 0]],
    "windows": lambda m, x: functional.unfold(picture(m, x), 2),
    "a matrix from the left": lambda m, x: m.vector.view(2, 8) @ m.first(x).view(-1, 8, 2),
    "one matrix against many": lambda m, x: m.first(x).view(-1, 1, 4, 4) @ m.vector.view(2, 4, 2),
}


NONLINEAR: dict[str, Build] = {
    "product": lambda m, x: m.first(x) * m.second(x),
    "product with broadcasting": lambda m, x: picture(m, x) * m.second(x)[:, :4].view(-1, 1, 4, 1),
    "square by product": lambda m, x: (h := m.first(x)) * h,
    "matrix product": lambda m, x: m.first(x).view(-1, 4, 4) @ m.second(x).view(-1, 4, 4),
    "quotient": lambda m, x: m.second(x) / positive(m, x),
    "constant over": lambda m, x: 2.5 / positive(m, x) + m.vector / positive(m, x),
    "square": lambda m, x: m.first(x) ** 2,
    "cube": lambda m, x: m.first(x) ** 3,
    "fourth power": lambda m, x: torch.pow(m.first(x), 4),
    "broken power": lambda m, x: positive(m, x) ** 1.5,
    "root": lambda m, x: torch.sqrt(positive(m, x)),
    "root that touches zero": lambda m, x: torch.sqrt(torch.relu(m.first(x))),
    "logarithm": lambda m, x: torch.log(positive(m, x)),
    "reciprocal": lambda m, x: torch.reciprocal(positive(m, x)) - 1 / -positive(m, x),
    "absolute": lambda m, x: m.first(x).abs(),
    "sine": lambda m, x: torch.sin(2 * m.first(x)),
    "cosine": lambda m, x: torch.cos(m.first(x)),
    "silu": lambda m, x: functional.silu(m.first(x)),
    "error function": lambda m, x: torch.erf(m.first(x)),
    "floor": lambda m, x: torch.floor(m.first(x)),
    "clamp": lambda m, x: m.first(x).clamp(-0.5, 0.7) + functional.relu6(m.first(x)),
    "maximum and minimum": lambda m, x: torch.maximum(m.first(x), m.second(x)) * torch.minimum(m.first(x), m.vector),
    "max pool": lambda m, x: functional.max_pool2d(picture(m, x), 2),
    "max pool with padding": lambda m, x: functional.max_pool2d(picture(m, x), 3, 2, 1),
    "softmax": lambda m, x: torch.softmax(m.first(x), dim=-1),
    "attention": attention,
    "layer norm": lambda m, x: m.layer_norm(m.first(x)),
    "rms norm": lambda m, x: m.rms_norm(m.first(x)),
}


COMPOSED: dict[str, Build] = {
    "gelu of the tanh form": lambda m, x: functional.gelu(m.first(x), approximate="tanh"),
    "softplus": lambda m, x: functional.softplus(m.first(x), beta=2.0),
    "elu": lambda m, x: functional.elu(m.first(x), 0.5) + functional.celu(m.second(x), 1.5),
    "selu": lambda m, x: functional.selu(m.first(x)),
    "mish": lambda m, x: functional.mish(m.first(x)),
    "hard sigmoid and hard swish": lambda m, x: functional.hardsigmoid(m.first(x)) - functional.hardswish(m.second(x)),
    "prelu": lambda m, x: functional.prelu(m.first(x), m.vector.abs() * 2),
    "log sigmoid": lambda m, x: functional.logsigmoid(m.first(x)),
    "arc tangent and hyperbolic sine": lambda m, x: torch.atan(m.first(x)) + torch.asinh(m.second(x)),
    "hyperbolic sine and cosine": lambda m, x: torch.sinh(m.first(x)) + torch.cosh(m.second(x)),
    "exponentials": lambda m, x: torch.expm1(m.first(x)) + torch.exp2(m.second(x)) - 3.0 ** m.first(x),
    "logarithms": lambda m, x: torch.log1p(positive(m, x)) + torch.log2(positive(m, x)),
    "rounding": lambda m, x: torch.ceil(m.first(x)) - torch.round(m.second(x)),
    "gated linear unit": lambda m, x: functional.glu(m.first(x), -1),
    "clamp by a vector": lambda m, x: torch.clamp(m.first(x), min=m.vector),
    "largest and smallest": lambda m, x: picture(m, x).amax(2) - picture(m, x).min(3).values,
    "max pool of part windows": lambda m, x: functional.max_pool2d(picture(m, x), 3, 2, ceil_mode=True),
    "dilated max pool": lambda m, x: functional.max_pool2d(picture(m, x), 2, 1, dilation=2),
    "maxima of uneven windows": lambda m, x: functional.adaptive_max_pool2d(picture(m, x), 3),
    "log softmax": lambda m, x: functional.log_softmax(m.first(x), -1),
    "log of a sum of exponentials": lambda m, x: torch.logsumexp(m.first(x).view(-1, 2, 8), -1),
    "attention with a mask": lambda m, x: functional.scaled_dot_product_attention(
        heads(m, x), heads(m, x), m.second(x).view(-1, 2, 4, 2), is_causal=True
    ),
    "group norm": lambda m, x: functional.group_norm(m.first(x).view(-1, 4, 4), 2, m.vector[:4], m.vector[4:8]),
    "instance norm": lambda m, x: functional.instance_norm(m.first(x).view(-1, 2, 8)),
    "standard deviation": lambda m, x: m.first(x).std(-1, keepdim=True),
    "length": lambda m, x: torch.linalg.vector_norm(m.first(x), dim=-1, keepdim=True),
    "product of entries": lambda m, x: m.first(x).view(-1, 4, 4).prod(-1),
    "batched matrix product": lambda m, x: torch.einsum("bij,bkj->bik", *[m.first(x).view(-1, 4, 4)] * 2),
    "bilinear form": lambda m, x: functional.bilinear(m.first(x)[:, :4], m.second(x)[:, :4], m.vector.view(1, 4, 4)),
}


GROUPS = {"linear": LINEAR, "nonlinear": NONLINEAR, "composed": COMPOSED}


class Together(nn.Module):
    """All operators side by side: tracing takes far longer than bounding."""

    def __init__(self, builds: dict[str, Build]) -> None:
        super().__init__()
        self.builds, self.inner = builds, Operator(lambda m, x: x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.entries(build, x) for build in self.builds.values()], dim=1)

    def entries(self, build: Build, x: Tensor) -> Tensor:
        """The last few of an operator's outputs, since each is bounded through all operators; all of linear ones."""
        found = build(self.inner, x).flatten(1)
        return found if self.builds is LINEAR else found[:, -8:]

    def names(self) -> list[str]:
        """Of the operator that each output comes from."""
        x = torch.zeros(1, 6, dtype=torch.float64)
        sizes = {name: self.entries(build, x).shape[1] for name, build in self.builds.items()}
        return [name for name, size in sizes.items() for _ in range(size)]


@cache
def made(group: str) -> tuple[Together, Network]:
    module = Together(GROUPS[group]).double().eval()
    return module, prepared(module, 6)


def blame(module: Any, wrong: Tensor) -> set[str]:
    """The operators with a wrong output, of ``(…, outputs)``, by the module's ``names()``."""
    positions = wrong.flatten(0, -2).any(dim=0).nonzero().squeeze(1).tolist()
    names = module.names()
    return {names[position] for position in positions}
