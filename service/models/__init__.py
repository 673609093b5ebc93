"""The model families and whole-model weights."""

from service.models.registry import FamilyConfig, Model, build
from service.models.whole import Weights, WeightsError, load_into, trained

__all__ = ["FamilyConfig", "Model", "Weights", "WeightsError", "build", "load_into", "trained"]
