"""Configurations of the built-in model families, without torch."""

from service.jobs.spec.families.base import ModelConfig, Reason
from service.jobs.spec.families.convnet import ConvnetConfig
from service.jobs.spec.families.mlp import MlpConfig
from service.jobs.spec.families.transformer import TransformerConfig

__all__ = ["ConvnetConfig", "MlpConfig", "ModelConfig", "Reason", "TransformerConfig"]
