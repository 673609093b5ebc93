"""Translates between a Llama-style ``config.json`` and our transformer's configuration, and refuses fields that we do
not have.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.formats.weights import CONFIG, read_shapes, read_text
from service.jobs.spec.arithmetic import DTYPES, DtypeName
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
    "padding_token": "pad_token_id",
}
"""Their field by ours."""
REQUIRED = ("vocab_size", "dim", "layers", "heads", "ffn_dim")
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_sequence": 2048, "norm_eps": 1e-6},
    "mistral": {"max_sequence": 131072, "norm_eps": 1e-6, "kv_heads": 8},
    "qwen2": {"max_sequence": 32768, "norm_eps": 1e-6, "kv_heads": 32},
}
"""The defaults of their library that differ from ours, by the model's type."""
_MISTRAL_WINDOW = 4096
"""Its default of ``sliding_window``."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "model_type": tuple(DEFAULTS),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
    "is_llama_config": (True,),
    "pruned_heads": ({},),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), (0.0,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1.0,)),
    **dict.fromkeys(
        (
            "add_cross_attention",
            "attention_bias",
            "is_encoder_decoder",
            "mlp_bias",
            "rope_interleaved",
            "tie_encoder_decoder",
            "use_mrope",
            "use_qk_norm",
        ),
        (False,),
    ),
}
"""Fields with the values that we can build; a field may also be absent or null, but for the model's type."""
_READ = {
    "layer_types",
    "original_max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
}
"""The other fields that are read here."""
NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _name_or_path architectures attn_implementation bad_words_ids base_model_pp_plan
    base_model_tp_plan begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range is_decoder keys_to_ignore_at_inference label2id length_penalty max_length
    max_window_layers min_length no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 - a list of them would be a screen long
)
"""Fields that change nothing in the forward of a model with weights: of generation, of storage, of bookkeeping."""
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
}
"""Their field of rotary scaling by ours, for the type llama3, the only one that we have: all must be given, but for the
last, which their library looks for beside the scaling, and takes for ``max_position_embeddings``.
"""
_ORIGINAL = SCALING["original_sequence"]
_OF_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Fields of any type of rotary positions."""


class LlamaError(ValueError):
    """A configuration that our transformer cannot take."""


def read_config(values: Mapping[str, Any]) -> TransformerConfig:
    """Return our configuration of a Llama-style model. Raises :class:`LlamaError` naming the field."""
    _check_known(values)
    rope = _rotary(values)
    values = {**values, **{name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}}
    for field, allowed in ONLY.items():
        _check_only(field, values.get(field), allowed)
    given = _own_fields(values)
    try:
        config = TransformerConfig.model_validate(
            {
                **given,
                "rope_scaling": _read_scaling(rope, values.get(_ORIGINAL), given["max_sequence"]),
                "tied_embeddings": bool(values.get("tie_word_embeddings")),
                "qkv_bias": values["model_type"] == "qwen2",
            }
        )
    except ValidationError as error:
        raise LlamaError(f"config.json does not describe a transformer: {error}") from error
    if config.head_features * config.heads == config.dim:
        config = config.model_copy(update={"head_dim": None})
    return _within_window(config, values)


def _own_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of our fields that have a field of theirs, with its model type's defaults."""
    given = {own: values[theirs] for own, theirs in FIELDS.items() if values.get(theirs) is not None}
    if missing := [FIELDS[own] for own in REQUIRED if own not in given]:
        raise LlamaError(f"config.json has no {missing[0]}")
    padding, count = given.get("padding_token"), given["vocab_size"]
    if isinstance(padding, int) and isinstance(count, int) and padding < 0:  # counted from the end, as torch does
        given["padding_token"] = padding + count
    defaults = dict(DEFAULTS[values["model_type"]])
    if FIELDS["kv_heads"] in values:  # null: as many as heads
        defaults.pop("kv_heads", None)
    return {**defaults, **given}


def _within_window(config: TransformerConfig, values: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration for sequences no longer than the sliding window, which changes nothing for them."""
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        expected = "a list of full_attention and sliding_attention"
        raise LlamaError(f"config.json has layer_types={reprlib.repr(kinds)}; expected {expected}")
    window = values.get("sliding_window", _MISTRAL_WINDOW if values["model_type"] == "mistral" else None)
    slides = "sliding_attention" in kinds
    if values["model_type"] == "qwen2" and not values.get("use_sliding_window") and not slides:
        window = None
    if window is None and slides:
        raise LlamaError("config.json has layer_types with sliding_attention and no sliding_window; expected a number")
    if window is None:
        return config
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise LlamaError(f"config.json has sliding_window={reprlib.repr(window)}; expected a number of tokens or null")
    return config.model_copy(update={"max_sequence": min(config.max_sequence, window)})


def uploaded_config(archive: Path) -> TransformerConfig:
    """Return the configuration in an uploaded archive, and check that its tensors fit it. Raises ``ValueError`` if a
    rank could not load it.
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
    """Return the object in a field; an empty one if the field is absent or null."""
    value = values.get(field)
    if value is not None and not isinstance(value, dict):
        raise LlamaError(f"config.json has {field}={reprlib.repr(value)}; expected an object or null")
    return value or {}


def _check_known(values: Mapping[str, Any]) -> None:
    """Raise :class:`LlamaError` for a field of which nobody knows here whether it changes the model."""
    known = NEUTRAL | _READ | ONLY.keys() | set(FIELDS.values())
    if unknown := sorted(name for name, value in values.items() if name not in known and value is not None):
        got = f"{unknown[0]}={reprlib.repr(values[unknown[0]])}"
        raise LlamaError(
            f"config.json has {got}, which our transformer does not know; expected null, or no such field if it "
            "changes nothing of the model"
        )


def _rotary(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings, which newer files keep in ``rope_parameters``; raises :class:`LlamaError` where two
    places say different things.
    """
    newer, older = (_object(values, name) for name in ("rope_parameters", "rope_scaling"))
    if newer and older and newer != older:
        raise LlamaError(
            f"config.json has rope_parameters={reprlib.repr(newer)} and rope_scaling={reprlib.repr(older)}; expected "
            "one of them, or both alike"
        )
    rope = {name: value for name, value in (newer or older).items() if value is not None}
    if (form := _form(rope)) not in ("default", "llama3"):
        got = reprlib.repr(form)
        raise LlamaError(f"config.json has rotary positions of type {got}; expected 'default' or 'llama3'")
    for name in ("rope_theta", "partial_rotary_factor", _ORIGINAL):
        own, other = rope.get(name), values.get(name)
        if own is not None and other is not None and own != other:
            raise LlamaError(f"config.json has {name}={reprlib.repr(other)}, and {own!r} among the rotary settings")
    return rope


def _form(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _read_scaling(rope: Mapping[str, Any], original: Any, longest: Any) -> dict[str, Any] | None:
    """Return our scaling; ``original`` is the length that stands beside the settings, if any, and ``longest`` the
    longest sequence.
    """
    form = _form(rope)
    own = _OF_ROPE | (set(SCALING.values()) if form == "llama3" else {_ORIGINAL})
    if foreign := sorted(name for name in rope if name not in own):
        raise LlamaError(
            f"config.json has {foreign[0]}={reprlib.repr(rope[foreign[0]])} for rotary positions of type {form!r}, "
            "which have no such field"
        )
    if form == "default":
        return None
    whole = {_ORIGINAL: longest if original is None else original, **rope}
    if missing := [name for name in SCALING.values() if name not in whole]:
        raise LlamaError(f"config.json has no {missing[0]} for rotary positions of type 'llama3'")
    return {own: whole[theirs] for own, theirs in SCALING.items()}


def write_config(config: TransformerConfig, dtype: DtypeName) -> dict[str, Any]:
    """Return a ``config.json`` for ``LlamaForCausalLM``, or with biases for ``Qwen2ForCausalLM``."""
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


EMBEDDING, HEAD = "embedding.weight", "head.weight"
THEIR_EMBEDDING, THEIR_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {EMBEDDING: THEIR_EMBEDDING, "norm.weight": "model.norm.weight", HEAD: THEIR_HEAD}
_QKV = ("query", "key", "value")
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attention.{ours}.bias": f"self_attn.{theirs}_proj.bias" for ours, theirs in zip(_QKV, "qkv", strict=True)}
DERIVED = "rotary_emb.inv_freq"
"""Tensors that old checkpoints also hold: they follow from the configuration."""


def their_names(config: TransformerConfig) -> dict[str, str]:
    """Return their name of each of our parameters; a head tied to the embedding has no name of its own."""
    in_block = _IN_BLOCK | (_BIASES if config.qkv_bias else {})
    blocks = {
        f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(config.layers)
        for ours, theirs in in_block.items()
    }
    outside = {ours: theirs for ours, theirs in _OUTSIDE.items() if not (config.tied_embeddings and ours == HEAD)}
    return outside | blocks


def check_tensors(shapes: Mapping[str, tuple[int, ...]], config: TransformerConfig) -> None:
    """Raise ``ValueError`` unless these tensors, by name, are those of a model of this configuration."""
    wanted = _their_shapes(config)
    optional = {THEIR_HEAD} if config.tied_embeddings else set()
    if missing := [name for name in wanted if name not in shapes]:
        raise ValueError(f"the checkpoint has no tensor {missing[0]} (and lacks {len(missing)} in all)")
    if foreign := [name for name in shapes if name not in wanted.keys() | optional and not name.endswith(DERIVED)]:
        raise ValueError(f"the checkpoint has {min(foreign)}, which a model of this configuration has not")
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise ValueError(f"{name} has shape {tuple(shapes[name])}; this configuration has it in {shape}")


def _their_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    table, dim, width = (config.vocab_size, config.dim), config.dim, config.feed_forward_dim
    queries, keys = config.heads * config.head_features, config.key_value_heads * config.head_features
    by_end = {
        "embed_tokens.weight": table,
        "lm_head.weight": table,
        "norm.weight": (dim,),
        "q_proj.weight": (queries, dim),
        "k_proj.weight": (keys, dim),
        "v_proj.weight": (keys, dim),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.weight": (dim, queries),
        "gate_proj.weight": (width, dim),
        "up_proj.weight": (width, dim),
        "down_proj.weight": (dim, width),
    }
    names = their_names(config).values()
    return {name: next(shape for end, shape in by_end.items() if name.endswith(end)) for name in names}
