"""Llama-style checkpoints: the same model in and out, what is refused, and what an archive may hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from llama_checkpoints import CONFIG, checkpoint_tensors, head_features, packed, upload_checkpoint
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from training_runs import JOB, MLP, TRANSFORMER, train, upload

from service.jobs.files import DataLayout
from service.jobs.spec.model import FromHuggingFace, ModelRef
from service.models import WeightsError, build, huggingface, load_into
from service.models.reference import resolve

SCALED = {
    **CONFIG,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


WIDE = {**CONFIG, "head_dim": 16}
QWEN2 = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def scaled(frequency: float, scaling: Mapping[str, Any]) -> float:
    """A frequency of the type llama3, case by case as their library has it."""
    context, low, high = (
        scaling[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / float(scaling["factor"])
    smooth = (context / wavelength - low) / (high - low)
    return float((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)


def reference_logits(config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """``LlamaForCausalLM`` written down from its definition, in float64, with its own conventions."""
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    size, (batch, length) = head_features(config), tokens.shape
    weight = {name: tensor.double() for name, tensor in weights.items()}
    frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    if scaling := config.get("rope_scaling"):
        frequencies = torch.tensor([scaled(frequency, scaling) for frequency in frequencies.tolist()]).double()
    angles = torch.outer(torch.arange(length).double(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)

    def norm(x: Tensor, name: str) -> Tensor:
        return weight[name] * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])

    def projected(x: Tensor, name: str) -> Tensor:
        return x @ weight[f"{name}.weight"].T + weight.get(f"{name}.bias", torch.zeros(()))

    def rotated(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
        return x * angles.cos() + half * angles.sin()

    x = weight["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = norm(x, f"{prefix}input_layernorm.weight")
        query, key, value = (
            projected(normed, f"{prefix}self_attn.{name}_proj").view(batch, length, -1, size).transpose(1, 2)
            for name in "qkv"
        )
        key, value = (each.repeat_interleave(groups, dim=1) for each in (rotated(key), value))
        scores = rotated(query) @ key.transpose(2, 3) / math.sqrt(size)
        scores = scores + torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)
        x = x + attended @ weight[f"{prefix}self_attn.o_proj.weight"].T
        normed = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = functional.silu(normed @ weight[f"{prefix}mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ weight[f"{prefix}mlp.up_proj.weight"].T)) @ weight[f"{prefix}mlp.down_proj.weight"].T
    head = weight.get("lm_head.weight", weight["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T


@pytest.mark.parametrize("form", ["tar", "zip"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", [CONFIG, SCALED, WIDE, QWEN2], ids=["plain", "scaled", "wide heads", "biases"])
def test_an_imported_model_computes_what_theirs_does(
    tmp_path: Path, form: str, tied: bool, base: dict[str, Any]
) -> None:
    config = {**base, "tie_word_embeddings": tied}
    tensors = checkpoint_tensors(config)
    file = upload_checkpoint(tmp_path, config, tensors, form)
    own, weights = resolve(FromHuggingFace(huggingface=file), DataLayout(tmp_path))
    assert weights is not None
    model = build(own, dtype=torch.float64)
    load_into(model, weights)
    tokens = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(2))
    expected = reference_logits(config, tensors, tokens)
    # The tables of the rotary angles are float32: 2^-24 of angles up to 40.
    assert torch.allclose(model(tokens), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
@pytest.mark.parametrize("base", [SCALED, {**QWEN2, "head_dim": 16}], ids=["scaled", "wide heads, biases"])
def test_a_round_trip_is_exact(
    tmp_path: Path, tied: bool, shard_bytes: int, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", shard_bytes)
    config = {**base, "tie_word_embeddings": tied}
    tensors = checkpoint_tensors(config)
    own, weights = huggingface.load(upload_checkpoint(tmp_path, config, tensors), DataLayout(tmp_path))
    folder = tmp_path / "out" / "huggingface"
    huggingface.write(folder, own, weights, "bf16")
    shards = sorted(folder.glob("*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 9000)
    written = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(torch.int16), tensor.view(torch.int16)), name
    described = json.loads((folder / "config.json").read_bytes())
    assert {name: described[name] for name in config} == config
    again, weights_again = huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))
    assert again == own
    assert all(torch.equal(weights_again[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_add_to_names_is_left_out(tmp_path: Path, prefix: str) -> None:
    tensors = checkpoint_tensors(CONFIG)
    wrapped = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    folders = tmp_path / "wrapped", tmp_path / "plain"
    (_, weights), (_, plain) = (
        huggingface.load(upload_checkpoint(folder, CONFIG, each), DataLayout(folder))
        for folder, each in zip(folders, (wrapped, tensors), strict=True)
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())


def train_and_export(folder: str, file: str) -> dict[str, Any]:
    """On two ranks: a step so small that it changes nothing, from an imported model, exported again."""
    data = {"source": "tokens", "sequence": 32}
    spec = {**TRANSFORMER, "model": {"huggingface": file}, "data": data, "export": {"huggingface": "bf16"}}
    frozen = {"optimizer": {"lr": 1e-30}, "steps": 1, "parallel": {"tp": 2}}
    return train(folder, {**spec, **frozen}, test_samples=8)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_job_starts_from_a_checkpoint_and_exports_it_from_any_layout(tmp_path: Path, torchrun: Torchrun) -> None:
    config = {**CONFIG, "vocab_size": 256}
    tensors = checkpoint_tensors(config)
    torchrun(train_and_export, 2, folder=str(tmp_path), file=upload_checkpoint(tmp_path, config, tensors))
    written = load_file(DataLayout(tmp_path).job(JOB).artifacts / "huggingface" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_only_a_transformer_can_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export.huggingface='fp32' needs a transformer; .* family 'mlp'"):
        train(tmp_path, {**MLP, "steps": 1, "export": {"huggingface": "fp32"}})


def test_weights_in_our_own_names_start_any_family(tmp_path: Path) -> None:
    ended = train(tmp_path / "first", {**MLP, "steps": 20})
    weights = (DataLayout(tmp_path / "first").job(JOB).artifacts / "model.safetensors").read_bytes()
    reference = {"safetensors": upload(tmp_path, weights), **MLP["model"]}
    started = train(tmp_path, {**MLP, "model": reference, "steps": 1, "optimizer": {"lr": 1e-30}})
    assert started["result"]["eval_loss"] == pytest.approx(ended["result"]["eval_loss"], rel=1e-6)
    other: ModelRef = TypeAdapter(ModelRef).validate_python({**reference, "hidden": [32, 16]})
    config, loaded = resolve(other, DataLayout(tmp_path))
    assert loaded is not None
    with pytest.raises(WeightsError, match=r"weights for .* have shape"):
        load_into(build(config), loaded)
