"""Provides the model families and whole-model weights."""

from service.models.full_weights import KeptWeights, Weights, WeightsError, load_into
from service.models.outline import ModelOutline
from service.models.registry import FamilyConfig, Model, build

__all__ = [
    "FamilyConfig",
    "KeptWeights",
    "Model",
    "ModelOutline",
    "Weights",
    "WeightsError",
    "build",
    "load_into",
]
