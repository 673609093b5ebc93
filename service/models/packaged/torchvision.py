"""Builds classifiers of the package torchvision."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from service.jobs.spec.families.torchvision import TorchvisionConfig
from service.models.packaged.base import check_name, classifier, imported
from service.parallel.mesh import Axis

_UNKNOWN = re.compile(r"operator (torchvision::\w+) does not exist")


def imported_torchvision() -> Any:
    """Return the package. Its import asks for its compiled operators, which do not load beside another build of torch
    than theirs, as its CUDA build beside torch for CPUs. No classifier calls one: they are declared, without kernels.
    """
    while True:
        try:
            return imported("torchvision")
        except RuntimeError as error:
            if (named := _UNKNOWN.search(str(error))) is None:
                raise
            torch.library.define(named[1], "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def build(config: TorchvisionConfig, axis: Axis) -> nn.Module:
    """Return the classifier, with random weights."""
    models = imported_torchvision().models
    check_name(config.name, models.list_models(module=models), "torchvision")
    return classifier(config, models.get_model, {"weights": None, "num_classes": config.classes})
