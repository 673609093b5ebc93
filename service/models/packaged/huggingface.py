"""Builds models of the package transformers of a configuration; nothing is fetched, and no code of others runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from service.jobs.spec.families.huggingface import HuggingfaceConfig
from service.models.modes import modes_kept
from service.models.packaged.base import Packaged, PackagedError, check_name, explained, imported, nearest
from service.models.packaged.plans import divide, own_parameters
from service.parallel.mesh import Axis

_OF_TASK = {
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "image-classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
}
"""The package's names of the class that chooses a model, and of its table."""


class _CausalLM(Packaged):
    """Token ids ``(batch, sequence)`` to logits ``(batch, sequence, vocabulary)``, whole on each rank."""

    def __init__(self, config: HuggingfaceConfig, network: nn.Module, axis: Axis) -> None:
        super().__init__(config, network)
        self.axis = axis
        self.summed = divide(network, axis) if axis.size > 1 else frozenset()

    def forward(self, ids: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "use_cache": False}
        if self.axis.size == 1:
            whole: Tensor = self.network(**inputs).logits
            return whole
        own = own_parameters(self.network, self.summed, self.axis)
        logits: Tensor = torch.func.functional_call(self.network, own, (), inputs).logits
        return logits


class _ImageClassifier(Packaged):
    """Pictures, flat or not, to logits ``(batch, classes)``."""

    def __init__(self, config: HuggingfaceConfig, network: nn.Module) -> None:
        super().__init__(config, network)
        self.in_shape = config.image or ()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(pixel_values=x.reshape(-1, *self.in_shape)).logits
        return logits


def build(config: HuggingfaceConfig, axis: Axis) -> nn.Module:
    """Return the model, with random weights.

    Raises :class:`PackagedError` for a type, a field or a task that the package does not have.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import
    transformers = imported("transformers")
    types = transformers.CONFIG_MAPPING
    check_name(config.model_type, list(types.keys()), "transformers", "model.config.model_type")
    _check_fields(config.config, types[config.model_type])
    fields = {name: value for name, value in config.config.items() if name != "model_type"}
    automatic, table = (getattr(transformers, name) for name in _OF_TASK[config.task])
    with explained("model.config", "transformers"):
        described = transformers.AutoConfig.for_model(config.model_type, **fields)
        if type(described) not in table:
            raise PackagedError(f"{config.model_type} has no model for task={config.task}")
        _check_length(config, described)
        network = automatic.from_config(described, trust_remote_code=False, dtype=torch.float32)
    if config.task == "causal-lm":
        _check_causal(config, described, network)
    return _CausalLM(config, network, axis) if config.task == "causal-lm" else _ImageClassifier(config, network)


def _check_length(config: HuggingfaceConfig, described: Any) -> None:
    """Raise :class:`PackagedError` for samples that are longer than the type has positions."""
    positions, known = "max_position_embeddings", described.attribute_map
    most = getattr(described, positions, None)
    if config.sequence and isinstance(most, int) and 0 < most < config.sequence:
        field = known.get(positions, positions)
        raise PackagedError(
            f"model.sequence: {config.sequence} is more than model.config.{field}={most}; expected at most {most}"
        )


def _check_causal(config: HuggingfaceConfig, described: Any, network: Any) -> None:
    """Raise :class:`PackagedError` for a model that sees the tokens that it is to predict."""
    may_see = any(getattr(described, field, None) == value for field, value in _OF_ENCODERS.items())
    if may_see and _sees_ahead(network, int(config.config["vocab_size"]), config.sequence or 1):
        raise PackagedError(
            f"model.config: {config.model_type} sees the tokens that it is to predict; expected is_decoder: true where "
            "the type has this field, or a type of causal models"
        )


_OF_ENCODERS = {"is_decoder": False, "causal": False, "attn_type": "bi"}
"""Fields of types that may see ahead, of which some do not. Others are not tried: a few change themselves meanwhile."""
_FEW, _ROUNDING = 8, 1e-6
"""The tokens of a sequence that is tried, and the share of the largest logit by which rounding may move another."""


@torch.no_grad()
def _sees_ahead(network: Any, vocabulary: int, sequence: int) -> bool:
    """Return whether another last token changes logits at the places before it; false on the meta device, and where the
    model takes no few tokens.
    """
    # Counted from the last, as the first tokens of a vocabulary may be padding.
    ids = (vocabulary - 1 - torch.arange(min(sequence, _FEW))).remainder(vocabulary).unsqueeze(0)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1 + vocabulary // 2) % vocabulary
    if ids.shape[1] < 2 or any(value.is_meta for value in network.parameters()):
        return False
    with modes_kept([network]), suppress(RuntimeError, ValueError, IndexError):
        network.eval()
        logits, others = (network(input_ids=each, use_cache=False).logits[:, :-1] for each in (ids, other))
        return bool((logits - others).abs().amax() > _ROUNDING * logits.abs().amax())
    return False


def _check_fields(given: dict[str, Any], kind: Any) -> None:
    """Raise :class:`PackagedError` for a field that the type does not have, at any depth: the package would take it
    without a word.
    """
    for path, name, known in _unknown(given, kind, "model.config"):
        raise PackagedError(f"{path}.{name}: {kind.model_type} has no such field{nearest(name, known)}")


def _unknown(given: dict[str, Any], kind: Any, path: str) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield the path, the name and the known ones for each field that a configuration's type does not have."""
    known = {*vars(kind()), *kind.attribute_map, "num_labels", "model_type"}
    for name, value in given.items():
        if name not in known:
            yield path, name, known
        elif name in kind.sub_configs and isinstance(value, dict):
            part = kind.sub_configs[name]
            if part.model_type:  # one that may be of any type has none
                yield from _unknown(value, part, f"{path}.{name}")
