"""Llama-style ``config.json`` and our transformer's configuration: what says the same, and what we do not have."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from service.formats.archive import CONFIG, read_shapes, read_text
from service.formats.llama_names import check_tensors
from service.jobs.spec.families import TransformerConfig

FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "max_sequence": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "head_dim": "head_dim",
}
"""Our field: theirs."""
REQUIRED = ("vocab_size", "dim", "layers", "heads", "ffn_dim")
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_sequence": 2048, "norm_eps": 1e-6},
    "mistral": {"max_sequence": 131072, "norm_eps": 1e-6, "kv_heads": 8},
    "qwen2": {"max_sequence": 32768, "norm_eps": 1e-6, "kv_heads": 32},
}
"""What their library takes where its file is silent, by the model's type; the rest of ours are the same as theirs."""
_MISTRAL_WINDOW = 4096
"""What it takes where a file of that type does not name ``sliding_window``."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "model_type": tuple(DEFAULTS),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
    "quantization_config": (),
}
"""Fields with the values that we can build; a field may also be absent or null, but for the model's type."""
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
}
"""Our field of rotary scaling: theirs, of the type llama3, the only one that we have."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class LlamaError(ValueError):
    """A configuration that our transformer cannot take."""


def read_config(values: Mapping[str, Any]) -> TransformerConfig:
    """Return our configuration of a Llama-style model. Raises :class:`LlamaError` naming the field."""
    rope = _object(values, "rope_parameters")  # newer files keep all rotary settings here
    values = {**values, **{name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}}
    for field, allowed in ONLY.items():
        _check_only(field, values.get(field), allowed)
    given = {own: values[theirs] for own, theirs in FIELDS.items() if values.get(theirs) is not None}
    if missing := [FIELDS[own] for own in REQUIRED if own not in given]:
        raise LlamaError(f"config.json has no {missing[0]}")
    try:
        scaling = _read_scaling(rope if _form(rope) else _object(values, "rope_scaling"))
        config = TransformerConfig.model_validate(
            {
                **DEFAULTS[values["model_type"]],
                **given,
                "rope_scaling": scaling,
                "tied_embeddings": bool(values.get("tie_word_embeddings")),
                "qkv_bias": values["model_type"] == "qwen2",
            }
        )
    except ValidationError as error:
        raise LlamaError(f"config.json does not describe a transformer: {error}") from error
    if config.head_features * config.heads == config.dim:
        config = config.model_copy(update={"head_dim": None})
    return _within_window(config, values)


def _within_window(config: TransformerConfig, values: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration for sequences of at most the sliding window, in which that changes nothing."""
    window = values.get("sliding_window", _MISTRAL_WINDOW if values["model_type"] == "mistral" else None)
    if values["model_type"] == "qwen2" and not values.get("use_sliding_window"):
        window = None
    if window is None:
        return config
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise LlamaError(f"config.json has sliding_window={reprlib.repr(window)}; expected a number of tokens or null")
    return config.model_copy(update={"max_sequence": min(config.max_sequence, window)})


def uploaded_config(archive: Path) -> TransformerConfig:
    """Return the configuration in an uploaded archive, whose tensors are of that. Raises ``ValueError`` where a rank
    could not take it either.
    """
    content = read_text(archive, CONFIG)
    try:
        values = json.loads(content)
    except RecursionError as error:
        raise LlamaError(f"{CONFIG} is nested too deeply") from error
    except ValueError as error:
        raise LlamaError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise LlamaError(f"{CONFIG} holds a {type(values).__name__}; expected an object")
    config = read_config(values)
    check_tensors(read_shapes(archive), config)
    return config


def _check_only(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value in allowed or (value is None and field != "model_type"):
        return
    expected = " or ".join(repr(each) for each in allowed) or "null"
    raise LlamaError(f"config.json has {field}={reprlib.repr(value)}; expected {expected}")


def _object(values: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the object in a field; an empty one where the field is absent or null."""
    value = values.get(field)
    if value is not None and not isinstance(value, dict):
        raise LlamaError(f"config.json has {field}={reprlib.repr(value)}; expected an object or null")
    return value or {}


def _form(rope: Mapping[str, Any]) -> Any:
    """Return the type of rotary positions, where one is given: beside some settings it is elsewhere."""
    return rope.get("rope_type") or rope.get("type")


def _read_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    form = _form(rope) or "default"
    if form == "default":
        return None
    if form != "llama3":
        got = reprlib.repr(form)
        raise LlamaError(f"config.json has rotary positions of type {got}; expected 'default' or 'llama3'")
    return {own: rope[theirs] for own, theirs in SCALING.items() if theirs in rope}


def write_config(config: TransformerConfig, dtype: Literal["fp32", "bf16"]) -> dict[str, Any]:
    """Return a ``config.json`` for ``LlamaForCausalLM``, or where there are biases for ``Qwen2ForCausalLM``."""
    scaling = config.rope_scaling and {SCALING[own]: value for own, value in config.rope_scaling.model_dump().items()}
    own = config.model_dump() | {"kv_heads": config.key_value_heads, "ffn_dim": config.feed_forward_dim}
    own |= {"head_dim": config.head_features}
    return {
        "architectures": ["Qwen2ForCausalLM" if config.qkv_bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if config.qkv_bias else "llama",
        **{theirs: own[field] for field, theirs in FIELDS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {"rope_type": "llama3", **scaling} if scaling else None,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": DTYPES[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
    }
