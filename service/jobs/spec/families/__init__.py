"""Defines the model families: the built-in ones, and those of installed packages."""

from service.jobs.plugins import ModelFamily
from service.jobs.plugins.catalogue import catalogue
from service.jobs.spec.families.convnet import ConvnetConfig
from service.jobs.spec.families.huggingface import HuggingfaceConfig
from service.jobs.spec.families.mlp import MlpConfig
from service.jobs.spec.families.timm import TimmConfig
from service.jobs.spec.families.torchvision import TorchvisionConfig
from service.jobs.spec.families.transformer import TransformerConfig

__all__ = ["FAMILIES", "ConvnetConfig", "MlpConfig", "TransformerConfig"]

FAMILIES = catalogue(
    ModelFamily,
    (
        ModelFamily(MlpConfig, "service.models.mlp:Mlp"),
        ModelFamily(ConvnetConfig, "service.models.convnet:Convnet"),
        ModelFamily(TransformerConfig, "service.models.transformer:Transformer"),
        ModelFamily(HuggingfaceConfig, "service.models.packaged.huggingface:build"),
        ModelFamily(TimmConfig, "service.models.packaged.timm:build"),
        ModelFamily(TorchvisionConfig, "service.models.packaged.torchvision:build"),
    ),
)
