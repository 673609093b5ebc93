"""Llama-style ``config.json`` and our transformer's configuration: what says the same, and what we do not have."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from service.formats.archive import CONFIG, read_text
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
}
"""Our field: theirs."""
REQUIRED = ("vocab_size", "dim", "layers", "heads", "ffn_dim")
DEFAULTS = {"max_sequence": 2048, "norm_eps": 1e-6}
"""What their library takes where its file is silent; the rest of ours are the same as theirs."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral"),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
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
        tied = bool(values.get("tie_word_embeddings"))
        config = TransformerConfig.model_validate(
            {**DEFAULTS, **given, "rope_scaling": scaling, "tied_embeddings": tied}
        )
    except ValidationError as error:
        raise LlamaError(f"config.json does not describe a transformer: {error}") from error
    head = values.get("head_dim")
    if head is not None and (not isinstance(head, int) or head * config.heads != config.dim):
        raise LlamaError(f"config.json has head_dim={reprlib.repr(head)}; expected hidden_size / num_attention_heads")
    return config


def uploaded_config(archive: Path) -> TransformerConfig:
    """Return the configuration in an uploaded archive. Raises ``ValueError`` where a rank could not take it either."""
    content = read_text(archive, CONFIG)
    try:
        values = json.loads(content)
    except RecursionError as error:
        raise LlamaError(f"{CONFIG} is nested too deeply") from error
    except ValueError as error:
        raise LlamaError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise LlamaError(f"{CONFIG} holds a {type(values).__name__}; expected an object")
    return read_config(values)


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
    """Return a ``config.json`` for ``LlamaForCausalLM``."""
    scaling = config.rope_scaling and {SCALING[own]: value for own, value in config.rope_scaling.model_dump().items()}
    own = config.model_dump() | {"kv_heads": config.key_value_heads, "ffn_dim": config.feed_forward_dim}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: own[field] for field, theirs in FIELDS.items()},
        "head_dim": config.dim // config.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {"rope_type": "llama3", **scaling} if scaling else None,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": DTYPES[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
    }
