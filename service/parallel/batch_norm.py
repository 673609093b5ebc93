"""Batch normalisation (Ioffe & Szegedy, 2015) whose statistics are those of the batches of all data-parallel ranks.

``torch.nn.SyncBatchNorm`` has no kernel for the CPU, counts with a collective of its own, and takes the place of
``torch.nn``'s classes only. Here a module becomes an instance of a subclass of its own class: parameters, buffers and
names stay, and so does what a fused layer of ``timm`` does after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from service.parallel.collectives import gather_with_reduce_from_group, reduce_from_group
from service.parallel.mesh import Axis

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AFTERWARDS = ("drop", "act")
"""The modules that ``timm.layers.BatchNormAct2d`` applies to the normalised batch, in order."""


def normalisations(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the batch normalisations of a model by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _KINDS)]


def normalise_over(model: nn.Module, dp: Axis) -> None:
    """Let each batch normalisation take its statistics over the ranks of ``dp``, in place, and normalise numbers of
    another type than its statistics have.

    Every rank must have as many numbers of a channel. Raises ``ValueError`` for a module without running statistics,
    and for a class that normalises in a way of its own.
    """
    for name, module in normalisations(model):
        kind: Any = type(module)
        if module.running_mean is None:
            raise ValueError(
                f"{name!r} keeps no running statistics, so what it computes for a sample would depend on the batch in "
                "evaluation, too; expected track_running_stats=True"
            )
        if kind.forward is nn.BatchNorm1d.forward or all(hasattr(module, each) for each in _AFTERWARDS):
            module.__class__ = _over_ranks(kind)
            module.dp = dp  # type: ignore[assignment]
        elif dp.size > 1:
            raise ValueError(
                f"{name!r} is a {kind.__name__}, whose statistics cannot be taken over data-parallel ranks; "
                "expected model.batch_norm: per-rank, or one of torch.nn's"
            )


@torch.no_grad()
def average_statistics(model: nn.Module, dp: Axis) -> None:
    """Give every rank of ``dp`` the mean of the ranks' running statistics; all call it, in one exchange."""
    held = [each for _, module in normalisations(model) for each in (module.running_mean, module.running_var)]
    buffers = [each for each in held if isinstance(each, Tensor)]
    if dp.size > 1 and buffers:
        means = reduce_from_group(torch.cat(buffers), dp.group) / dp.size
        for buffer, mean in zip(buffers, torch.split(means, [len(each) for each in buffers]), strict=True):
            buffer.copy_(mean)


@cache
def _over_ranks(kind: Any) -> type[nn.Module]:
    class OverRanks(kind):  # type: ignore[misc]
        dp: Axis

        def forward(self, x: Tensor) -> Tensor:
            is_own = x.dtype == self.running_mean.dtype and not (self.training and self.dp.size > 1)
            if is_own:
                return super().forward(x)  # type: ignore[no-any-return]
            x = _normalised(self, x, self.dp)
            for name in _AFTERWARDS:
                x = getattr(self, name)(x) if hasattr(self, name) else x
            return x

    OverRanks.__name__ = OverRanks.__qualname__ = kind.__name__
    return OverRanks


def _normalised(module: Any, x: Tensor, dp: Axis) -> Tensor:
    """Return ``x`` (batch, channels, …) normalised over all other dimensions and all ranks, in float32 at least, or in
    evaluation by the running statistics.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, variance = _statistics(module, wide, dp) if module.training else (module.running_mean, module.running_var)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    scale = (variance + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight
    shift = -mean * scale if module.bias is None else module.bias - mean * scale
    normalised: Tensor = wide * scale.view(shape) + shift.view(shape)
    return normalised.to(x.dtype)


def _statistics(module: Any, x: Tensor, dp: Axis) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel over all ranks, and note them.

    Shares are equal: the variance is the mean of the ranks' own and of their means' distance from the common one, which
    loses no digits (Chan, Golub & LeVeque, 1983).
    """
    dimensions = [0, *range(2, x.dim())]
    count = dp.size * x.numel() // x.shape[1]
    own = torch.stack((x.mean(dimensions), x.var(dimensions, correction=0)))
    means, variances = gather_with_reduce_from_group(own.unsqueeze(0), 0, dp.group, dp.size).unbind(1)
    mean = means.mean(0)
    variance = (variances + (means - mean).square()).mean(0)
    _note(module, mean.detach(), variance.detach() * (count / max(count - 1, 1)))
    return mean, variance


@torch.no_grad()
def _note(module: Any, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards those of a batch, as ``torch.nn`` does; the variance is the unbiased one."""
    module.num_batches_tracked.add_(1)
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        share = module.momentum
        if share is None:
            share = module.num_batches_tracked.to(running.dtype).reciprocal()
        running.mul_(1 - share).add_(value.to(running.dtype) * share)
