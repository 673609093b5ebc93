"""Builds classifiers of the package timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from service.jobs.spec.families.timm import TimmConfig
from service.models.packaged.base import check_name, classifier, imported
from service.parallel.mesh import Axis


def build(config: TimmConfig, axis: Axis) -> nn.Module:
    """Return the classifier, with random weights. An architecture for one size of pictures is built for ours."""
    timm = imported("timm")
    check_name(config.name, timm.list_models(), "timm")
    arguments: dict[str, Any] = {"num_classes": config.classes, "in_chans": config.channels}
    described = timm.get_pretrained_cfg(config.name)
    if described is not None and described.fixed_input_size:
        arguments["img_size"] = (config.height, config.width)
    return classifier(config, timm.create_model, {"pretrained": False, **arguments})
