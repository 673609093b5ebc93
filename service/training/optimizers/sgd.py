"""Gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import SGD

from service.jobs.spec import optimizer as specs
from service.training.optimizers.base import Rule, UpdateGroup


def sgd(config: specs.SgdConfig, groups: Sequence[UpdateGroup], device: torch.device) -> list[Rule]:
    """Return the one rule of a job whose optimizer is SGD. A momentum that begins at zero is torch's own, which
    begins at the first gradient.
    """
    optimizer = SGD(
        [group.of_torch() for group in groups], momentum=config.momentum, nesterov=config.nesterov, foreach=True
    )
    return [Rule("sgd", optimizer, ("momentum_buffer",) if config.momentum else (), groups, counts=False)]
