"""The model families and whole-model weights."""

from service.models.registry import FamilyConfig, Model, build
from service.models.whole import WeightsError, load_into, load_whole

__all__ = ["FamilyConfig", "Model", "WeightsError", "build", "load_into", "load_whole"]
