"""The model families and whole-model weights."""

from service.models.registry import FamilyConfig, Model, build

__all__ = ["FamilyConfig", "Model", "build"]
