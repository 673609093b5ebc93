"""Defines the optimizers: how each is built, and what of its state a checkpoint holds.

Another one is a function and a line of :data:`OPTIMIZERS` here, and its name in ``OptimizerSpec``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from service.jobs.spec.train import OptimizerSpec


@dataclass(frozen=True)
class OptimizerKind:
    """Builds an optimizer, and knows its state."""

    build: Callable[[Iterable[nn.Module], OptimizerSpec, torch.device], Optimizer]
    moments: tuple[str, ...]
    """What it keeps of each parameter, in the parameter's shape, by torch's names."""

    def prime(self, optimizer: Optimizer, step: int, behind: Mapping[Tensor, int]) -> None:
        """Give it the state that it would have created by ``step``, so that a checkpoint can be loaded into it.

        The counts of steps aren't tensors of a checkpoint: its step says them, but for parameters that are ``behind``
        (:meth:`behind`).
        """
        on_device = bool(optimizer.defaults["fused"] or optimizer.defaults["capturable"])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                count = behind.get(parameter, step)
                counted = torch.tensor(float(count), device=parameter.device if on_device else "cpu")
                zeros = {moment: torch.zeros_like(parameter) for moment in self.moments}
                optimizer.state[parameter] = {"step": counted, **zeros}

    def behind(self, optimizer: Optimizer, step: int) -> Mapping[Tensor, int]:
        """Return the counts of parameters that had no gradient in some step until ``step``, as a layer that is skipped
        at random has none: the optimizer has left them as they were.
        """
        learning = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        counts = torch.stack([optimizer.state[each]["step"] for each in learning]).tolist() if learning else []
        return {each: int(count) for each, count in zip(learning, counts, strict=True) if count != step}


def _build_adamw(stages: Iterable[nn.Module], spec: OptimizerSpec, device: torch.device) -> Optimizer:
    """Build AdamW: one kernel for all parameters on CUDA, one call per operation elsewhere."""
    return AdamW(
        [parameter for stage in stages for parameter in stage.parameters()],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        **{"fused" if device.type == "cuda" else "foreach": True},
    )


OPTIMIZERS: Mapping[str, OptimizerKind] = {"adamw": OptimizerKind(_build_adamw, ("exp_avg", "exp_avg_sq"))}
"""Optimizers by the names of ``OptimizerSpec``."""
