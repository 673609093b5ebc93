"""Lists the models of ``benchmarks/model_zoo.py``, by configuration: random weights, nothing is downloaded.

Each entry names the package that it needs, and builds a model of the sizes that fit on a laptop: images of 32 × 32 and
ten classes, sequences of eight vectors. Nets of torch alone are in ``zoo_nets.py``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zoo_nets
from torch import Tensor, nn

IMAGE, TOKENS = (3, 32, 32), (8, 64)


@dataclass(frozen=True)
class Entry:
    """A model: the package that it needs, how it is built from it, the shape of an instance and the box's radius."""

    package: str
    build: Callable[[Any], Any]
    shape: tuple[int, ...] = IMAGE
    eps: float = 1e-3

    def model(self) -> Any:
        """Return an ``nn.Module``, or an estimator that was fitted. Raises ``ImportError`` without the package."""
        return self.build(importlib.import_module(self.package))


class Embedded(nn.Module):
    """A language model from its embeddings on, as a certificate over them needs it."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(inputs_embeds=x, **self.given).last_hidden_state
        return found[:, -1]


class Field(nn.Module):
    """A model whose forward answers with named fields, as its one tensor; ``name`` is of its argument."""

    def __init__(self, model: nn.Module, name: str, field: str = "logits", **given: Any) -> None:
        super().__init__()
        self.model, self.name, self.field, self.given = model, name, field, given

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(self.model(**{self.name: x}, **self.given), self.field)
        return found.flatten(1)


def _vision(name: str, **given: Any) -> Entry:
    return Entry("torchvision.models", lambda models: getattr(models, name)(weights=None, num_classes=10, **given))


def _vgg(models: Any) -> nn.Module:
    layers = models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=True)
    net = models.VGG(layers, num_classes=10, dropout=0.0)
    net.avgpool, net.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 10)
    return net  # type: ignore[no-any-return]


def _convnext(models: Any) -> nn.Module:
    setting = importlib.import_module("torchvision.models.convnext").CNBlockConfig
    return models.ConvNeXt([setting(24, 48, 1), setting(48, None, 1)], num_classes=10)  # type: ignore[no-any-return]


def _shuffle(models: Any) -> nn.Module:
    return models.ShuffleNetV2([1, 2, 1], [16, 32, 64, 96, 128], num_classes=10)  # type: ignore[no-any-return]


def _vit(models: Any) -> nn.Module:
    return models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)  # type: ignore[no-any-return]


def _swin(models: Any) -> nn.Module:
    return models.SwinTransformer(  # type: ignore[no-any-return]
        [4, 4], 24, [1, 1], [2, 4], [4, 4], num_classes=10, stochastic_depth_prob=0.0
    )


def _resnext(models: Any) -> nn.Module:
    block = models.resnet.Bottleneck
    return models.ResNet(block, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=16)  # type: ignore[no-any-return]


TORCHVISION = {
    "alexnet-64": Entry("torchvision.models", lambda models: models.AlexNet(num_classes=10, dropout=0.0), (3, 64, 64)),
    "vgg-bn": Entry("torchvision.models", _vgg),
    "resnet18": _vision("resnet18"),
    "resnext14": Entry("torchvision.models", _resnext),
    "squeezenet1_1": _vision("squeezenet1_1"),
    "mobilenet_v2": _vision("mobilenet_v2", width_mult=0.35),
    "mobilenet_v3_small": _vision("mobilenet_v3_small"),
    "shufflenet_v2": Entry("torchvision.models", _shuffle),
    "mnasnet0_5": _vision("mnasnet0_5"),
    "regnet_y_400mf": _vision("regnet_y_400mf"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "densenet": Entry(
        "torchvision.models",
        lambda models: models.DenseNet(8, (2, 2, 2), num_init_features=16, num_classes=10),
    ),
    "convnext": Entry("torchvision.models", _convnext),
    "vit-2": Entry("torchvision.models", _vit),
    "swin-2": Entry("torchvision.models", _swin),
}

_SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}


def _timm(name: str, **given: Any) -> Entry:
    return Entry("timm", lambda timm: timm.create_model(name, pretrained=False, num_classes=10, **given))


def _mixer(**given: Any) -> Entry:
    """Return a mixer of two blocks; layers are given by their names."""

    def build(family: Any) -> nn.Module:
        named = {name: getattr(family, each) if isinstance(each, str) else each for name, each in given.items()}
        return family.MlpMixer(10, 32, patch_size=8, num_blocks=2, embed_dim=64, **named)  # type: ignore[no-any-return]

    return Entry("timm.models.mlp_mixer", build)


def _poolformer(family: Any) -> nn.Module:
    return family.MetaFormer(  # type: ignore[no-any-return]
        num_classes=10, depths=(1, 1, 1, 1), dims=(16, 24, 32, 48), downsample_norm=None, mlp_act=nn.GELU,
        mlp_bias=True, norm_layers=family.GroupNorm1, layer_scale_init_values=1e-5, res_scale_init_values=None,
        use_mlp_head=False,
    )  # fmt: skip


def _nf_resnet(family: Any) -> nn.Module:
    config = family._nfres_cfg(depths=(1, 1, 1, 1), channels=(64, 128, 256, 512))
    return family.NormFreeNet(config, num_classes=10)  # type: ignore[no-any-return]


TIMM = {
    "deit-2": _timm("deit_tiny_distilled_patch16_224", **_SMALL),
    "timm-vit-2": _timm("vit_tiny_patch16_224", **_SMALL),
    "vit-gap-2": _timm("vit_tiny_patch16_224", global_pool="avg", **_SMALL),
    "cait-2": _timm("cait_xxs24_224", **(_SMALL | {"depth_token_only": 1})),
    "mixer-2": _mixer(),
    "gmlp-2": _mixer(mlp_ratio=6, block_layer="SpatialGatingBlock", mlp_layer="GatedMlp"),
    "resmlp-2": _mixer(mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine"),
    "resnet10t": _timm("resnet10t"),
    "resnet14t-eca": _timm("ecaresnet26t", layers=(1, 1, 1, 1)),
    "convnext-atto": _timm("convnext_atto", depths=(1, 1, 1, 1)),
    "convmixer": Entry("timm.models.convmixer", lambda family: family.ConvMixer(32, 2, 5, 4, num_classes=10)),
    "ghostnet_050": _timm("ghostnet_050"),
    "repvgg": _timm("repvgg_a0"),
    "lcnet_035": _timm("lcnet_035"),
    "tinynet_e": _timm("tinynet_e"),
    "mobilenetv4": _timm("mobilenetv4_conv_small_035"),
    "poolformer": Entry("timm.models.metaformer", _poolformer),
    "mobilevit": Entry("timm", lambda timm: timm.create_model("mobilevit_xxs", num_classes=10), (3, 64, 64)),
    "fastvit": Entry("timm", lambda timm: timm.create_model("fastvit_t8", num_classes=10), (3, 64, 64)),
    "nfnet": Entry("timm.models.nfnet", _nf_resnet),
}

_TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT |= {"vocab_size": 100, "max_position_embeddings": 32, "attn_implementation": "sdpa"}
_KEYED = {"num_key_value_heads": 2, "use_cache": False}


def _text(model: str, config: str, *, eager: bool = False, **given: Any) -> Entry:
    def build(transformers: Any) -> nn.Module:
        kind = getattr(transformers, config)
        known = set(inspect.signature(kind).parameters) | {"attn_implementation"}
        chosen = {name: value for name, value in (_TEXT | given).items() if name in known}
        chosen |= {"attn_implementation": "eager"} if eager else {}
        return Embedded(getattr(transformers, model)(kind(**chosen)))

    return Entry("transformers", build, TOKENS, 1e-2)


def _patch_tst(transformers: Any) -> nn.Module:
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, prediction_length=4,
        d_model=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
    )  # fmt: skip
    return Field(transformers.PatchTSTForPrediction(config), "past_values", "prediction_outputs")


def _wav2vec(transformers: Any) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        classifier_proj_size=16, num_labels=10,
    )  # fmt: skip
    return Field(transformers.Wav2Vec2ForSequenceClassification(config), "input_values")


def _hf_vit(transformers: Any) -> nn.Module:
    config = transformers.ViTConfig(**_TEXT, image_size=32, patch_size=8, num_labels=10)
    return Field(transformers.ViTForImageClassification(config), "pixel_values")


def _segformer(transformers: Any) -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=10,
    )  # fmt: skip
    return Field(transformers.SegformerForImageClassification(config), "pixel_values")


TRANSFORMERS = {
    "bert-2": _text("BertModel", "BertConfig"),
    "bert-2-eager": _text("BertModel", "BertConfig", eager=True),
    "roberta-2": _text("RobertaModel", "RobertaConfig"),
    "distilbert-2": _text("DistilBertModel", "DistilBertConfig", dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "albert-2": _text("AlbertModel", "AlbertConfig", embedding_size=64),
    "electra-2": _text("ElectraModel", "ElectraConfig", embedding_size=64),
    "gpt2-2": _text("GPT2Model", "GPT2Config", n_embd=64, n_layer=2, n_head=4, n_positions=32, use_cache=False),
    "opt-2": _text("OPTModel", "OPTConfig", ffn_dim=128, word_embed_proj_dim=64, use_cache=False),
    "llama-2": _text("LlamaModel", "LlamaConfig", **_KEYED),
    "mistral-2": _text("MistralModel", "MistralConfig", **_KEYED),
    "qwen2-2": _text("Qwen2Model", "Qwen2Config", **_KEYED),
    "gemma-2": _text("GemmaModel", "GemmaConfig", head_dim=16, **_KEYED),
    "phi-2": _text("PhiModel", "PhiConfig", **_KEYED),
    "t5-encoder-2": _text("T5EncoderModel", "T5Config", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
    "hf-vit-2": Entry("transformers", _hf_vit),
    "segformer": Entry("transformers", _segformer),
    "patchtst": Entry("transformers", _patch_tst, (32, 3), 1e-2),
    "wav2vec2": Entry("transformers", _wav2vec, (400,)),
}


def _fitted(dataset: str, chain: Callable[[Any], list[Any]], features: int, eps: float = 1e-2) -> Entry:
    def build(sklearn: Any) -> Any:
        data = getattr(importlib.import_module("sklearn.datasets"), f"load_{dataset}")(return_X_y=True)
        kinds = {name: importlib.import_module(f"sklearn.{name}") for name in _KINDS}
        make = importlib.import_module("sklearn.pipeline").make_pipeline
        return make(*chain(type("Kinds", (), kinds))).fit(*data)

    return Entry("sklearn", build, (features,), eps)


_KINDS = ("preprocessing", "linear_model", "neural_network", "decomposition", "svm", "ensemble")
SKLEARN = {
    "sk-logistic": _fitted(
        "iris", lambda sk: [sk.preprocessing.StandardScaler(), sk.linear_model.LogisticRegression()], 4
    ),
    "sk-ridge": _fitted("diabetes", lambda sk: [sk.preprocessing.MinMaxScaler(), sk.linear_model.Ridge()], 10),
    "sk-mlp-digits": _fitted(
        "digits",
        lambda sk: [sk.neural_network.MLPClassifier(hidden_layer_sizes=(32, 32), max_iter=60, random_state=0)],
        64,
        0.1,
    ),
    "sk-mlp-tanh": _fitted(
        "wine",
        lambda sk: [
            sk.preprocessing.StandardScaler(),
            sk.neural_network.MLPClassifier(hidden_layer_sizes=(16,), activation="tanh", max_iter=200, random_state=0),
        ],
        13,
    ),
    "sk-mlp-regressor": _fitted(
        "diabetes",
        lambda sk: [
            sk.preprocessing.MaxAbsScaler(),
            sk.neural_network.MLPRegressor(hidden_layer_sizes=(32,), max_iter=100, random_state=0),
        ],
        10,
    ),
    "sk-pca-mlp": _fitted(
        "digits",
        lambda sk: [
            sk.decomposition.PCA(16),
            sk.neural_network.MLPClassifier(hidden_layer_sizes=(32,), max_iter=60, random_state=0),
        ],
        64,
        0.1,
    ),
    "sk-forest": _fitted("iris", lambda sk: [sk.ensemble.RandomForestClassifier(10, random_state=0)], 4),
}  # fmt: skip

NETS = {
    name: Entry("torch.nn", lambda _, build=build: build(), shape, eps)  # type: ignore[misc]
    for name, (build, shape, eps) in zoo_nets.NETS.items()
}

ZOO: Mapping[str, Entry] = {**NETS, **TORCHVISION, **TIMM, **TRANSFORMERS, **SKLEARN}
GROUPS = {"nets": NETS, "torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS, "sklearn": SKLEARN}
REFUSED_ON_PURPOSE = frozenset({"sk-forest"})
"""Models that jump: nothing bounds them, and the refusal says so."""


def seeded(entry: Entry) -> tuple[Any, Tensor]:
    """Return an entry's model and the centre of its box, the same in every process; norms know typical inputs."""
    torch.manual_seed(0)
    model = entry.model()
    if not isinstance(model, nn.Module):
        return model, _row_of(model, entry)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # a head for fine-tuning, which would answer 0 to everything
                weight.normal_(std=weight[0].numel() ** -0.5)
        if norms:
            for module in norms:
                module.momentum = None  # the mean of all batches
            model.train()
            for _ in range(2):
                model(torch.randn(16, *entry.shape))
    return model.eval().requires_grad_(requires_grad=False), torch.randn(entry.shape)


def _row_of(model: Any, entry: Entry) -> Tensor:
    first = model[0]
    centre = getattr(first, "mean_", getattr(first, "data_min_", None))
    return torch.zeros(entry.shape) if centre is None else torch.as_tensor(centre).float()
