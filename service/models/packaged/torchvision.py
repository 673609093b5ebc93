"""Builds classifiers of the package torchvision."""

from __future__ import annotations

from torch import nn

from service.jobs.spec.families.torchvision import TorchvisionConfig
from service.models.packaged.base import check_name, classifier, imported
from service.parallel.mesh import Axis


def build(config: TorchvisionConfig, axis: Axis) -> nn.Module:
    """Return the classifier, with random weights."""
    models = imported("torchvision").models
    check_name(config.name, models.list_models(module=models), "torchvision")
    return classifier(config, models.get_model, {"weights": None, "num_classes": config.classes})
