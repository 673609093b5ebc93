"""Llama-style checkpoints: the same model in and out, what is refused, and what an archive may hold."""

from __future__ import annotations

import io
import json
import math
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn import functional
from training_runs import JOB, MLP, TRANSFORMER, train, upload

from service.formats import archive
from service.formats.llama import LlamaError, read_config, their_names, write_config
from service.jobs.layout import DataLayout
from service.jobs.spec.model import FromHuggingFace, ModelRef, TransformerConfig
from service.models import WeightsError, build, huggingface, load_into
from service.models.huggingface import writing
from service.models.reference import resolve

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


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


def head_features(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def checkpoint_tensors(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights by the names and shapes of ``LlamaForCausalLM``."""
    generator = torch.Generator().manual_seed(1)
    dim, width = config["hidden_size"], config["intermediate_size"]
    broad, narrow = (head_features(config) * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.q_proj.weight": (broad, dim), f"{prefix}self_attn.o_proj.weight": (dim, broad)}
        if config["model_type"] == "qwen2":
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": (broad if name == "q" else narrow,) for name in "qkv"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (narrow, dim) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (width, dim) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (dim, width)
    drawn = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return {name: (tensor + 1 if "norm" in name else tensor).to(dtype) for name, tensor in drawn.items()}


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def packed(folder: Path, form: str) -> bytes:
    """The files of ``folder`` in an archive, below a folder of its own."""
    buffer = io.BytesIO()
    if form == "tar":
        with tarfile.open(fileobj=buffer, mode="w:") as tar:
            tar.add(folder, arcname="llama")
    else:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
            for path in folder.iterdir():
                opened.write(path, f"llama/{path.name}")
    return buffer.getvalue()


def upload_checkpoint(root: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], form: str = "tar") -> str:
    root.mkdir(exist_ok=True)
    write_checkpoint(root / "source", config, tensors)
    return upload(root, packed(root / "source", form))


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
    monkeypatch.setattr(writing, "SHARD_BYTES", shard_bytes)
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


# As the two libraries' files of these models have them, less what does not concern the architecture.
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_a_published_configuration() -> None:
    expected = {"vocab_size": 32000, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn_dim": 11008}
    config = read_config(LLAMA_2_7B)
    assert config == TransformerConfig(**expected, max_sequence=4096, norm_eps=1e-5, rope_theta=1e4)
    newer = {**CONFIG, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    assert read_config(newer) == read_config(CONFIG)
    assert read_config(write_config(config, "bf16")) == config


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({"model_type": "mistral", "sliding_window": None}, 64),
        ({"model_type": "mistral", "sliding_window": 4096}, 64),
        ({"model_type": "mistral", "sliding_window": 24}, 24),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, 4096),
        ({"sliding_window": None}, 64),
        ({"model_type": "qwen2", "sliding_window": 24}, 64),
        ({"model_type": "qwen2", "sliding_window": 24, "use_sliding_window": True}, 24),
    ],
)
def test_sequences_are_as_long_as_a_sliding_window_changes_nothing(change: dict[str, Any], longest: int) -> None:
    assert read_config({**CONFIG, **change}).max_sequence == longest


def test_scaling_counts_beside_rotary_settings_of_no_type() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    beside = read_config({**CONFIG, "rope_parameters": {"rope_theta": 500.0}, "rope_scaling": scaling})
    assert beside.rope_scaling is not None
    assert beside == read_config({**CONFIG, "rope_parameters": {"rope_theta": 500.0, **scaling}})
    typed = {"rope_theta": 500.0, "type": "default"}
    assert read_config({**CONFIG, "rope_parameters": typed, "rope_scaling": scaling}).rope_scaling is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type='qwen3'; expected 'llama' or 'mistral' or 'qwen2'"),
        ({"model_type": None}, "model_type=None; expected 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; expected 'silu'"),
        ({"attention_bias": True}, "attention_bias=True; expected False"),
        ({"sliding_window": "4096"}, "sliding_window='4096'; expected a number of tokens or null"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "positions of type 'linear'; expected 'default' or"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "positions of type 'yarn'; expected"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"head_dim": 7}, "head_dim: it is odd"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": 33}, r"dim=33 does not divide into heads=4"),
    ],
)
def test_what_our_transformer_does_not_have_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LlamaError, match=message):
        read_config({**CONFIG, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"has no tensor model.norm.weight \(and lacks 1 in all\)"),
        ({"model.norm.weight": torch.zeros(31)}, r"model.norm.weight has shape \(31,\); this .* has it in \(32,\)"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, r"has model.layers.0.self_attn.q_proj.bias, which"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(
    tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    tensors = {name: each for name, each in {**checkpoint_tensors(CONFIG), **change}.items() if each is not None}
    with pytest.raises(WeightsError, match=rf"model.huggingface: file_.*{message}"):
        huggingface.load(upload_checkpoint(tmp_path, CONFIG, tensors), DataLayout(tmp_path))


def test_a_tied_head_that_a_file_repeats_must_be_the_embedding(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = checkpoint_tensors(config)
    table = tensors["model.embed_tokens.weight"]
    file = upload_checkpoint(tmp_path / "equal", config, {**tensors, "lm_head.weight": table.clone()})
    own, weights = huggingface.load(file, DataLayout(tmp_path / "equal"))
    assert own.tied_embeddings
    assert weights.keys() == their_names(own).keys()
    assert "head.weight" not in weights
    file = upload_checkpoint(tmp_path / "other", config, {**tensors, "lm_head.weight": table + 1})
    with pytest.raises(WeightsError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        huggingface.load(file, DataLayout(tmp_path / "other"))


def test_derived_tensors_and_an_index_are_obeyed(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(CONFIG)
    folder = tmp_path / "source"
    write_checkpoint(folder, CONFIG, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    save_file(tensors, folder / "consolidated.safetensors")  # the same weights again, as some repositories have them
    save_file({"layers.0.lora_A": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    _, weights = huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))
    assert weights.keys() == their_names(read_config(CONFIG)).keys()
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / archive.INDEX).write_text(json.dumps(index))
    _, weights = huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))
    assert weights.keys() == their_names(read_config(CONFIG)).keys()
    (folder / archive.INDEX).write_text(json.dumps({"weight_map": {"x": "../../model-2.safetensors"}}))
    with pytest.raises(WeightsError, match=r"names model-2.safetensors, which the archive does not have"):
        huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return buffer.getvalue()


def linked() -> bytes:
    """A tar whose configuration is a link to a file of the host."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as tar:
        link = tarfile.TarInfo("config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return buffer.getvalue()


def compressed() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz"):
        pass
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: b"no archive at all", "expected a zip or an uncompressed tar"),
        (compressed, "expected a zip or an uncompressed tar"),
        (lambda: zipped({"readme.md": b"hello"}), "the archive has no config.json"),
        (lambda: zipped({"config.json": b"{}"}), "the archive has no .safetensors file beside config"),
        (
            lambda: zipped({"config.json": b"{}", "other/x.safetensors": b""}),
            "the archive has no .safetensors file beside",
        ),
        (
            lambda: zipped({"config.json": b"{}", "x.safetensors": b"\0" * 2**27}),
            r"unpacks to \d+, more than 4 times as many",
        ),
        (lambda: zipped({"config.json": b"{}", "x.safetensors": b"no"}), "file_.*: "),
        (lambda: zipped({"config.json": b"[]", "x.safetensors": b"no"}), "file_.*: "),
        (linked, "the archive has no config.json"),
    ],
)
def test_an_archive_that_is_no_checkpoint_is_refused(
    tmp_path: Path, content: Callable[[], bytes], message: str
) -> None:
    layout = DataLayout(tmp_path)
    with pytest.raises(WeightsError, match=message):
        huggingface.load(upload(tmp_path, content()), layout)
    assert not [path for path in layout.cache.rglob("*") if "making" in path.name]


def test_nothing_leaves_the_folder_that_is_unpacked_to(tmp_path: Path) -> None:
    members = {"../../evil/config.json": b"{}", "../../evil/x.safetensors": b"", "../../evil/run.py": b""}
    (tmp_path / "archive").write_bytes(zipped(members))
    archive.unpack(tmp_path / "archive", tmp_path / "deep")
    assert {path.name for path in tmp_path.rglob("*")} == {"archive", "deep", "config.json", "x.safetensors"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"config.json", "x.safetensors"}
    assert archive.read_text(tmp_path / "archive", "config.json") == b"{}"


def test_an_export_has_the_tokenizer_that_made_the_tokens(tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["[UNK]", "a", "b", "c"])}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    described = made.to_str().encode()
    data = {"source": "file", "format": "tokens", "encoding": "text", "sequence": 8, "vocabulary": 256}
    data |= {"file": upload(tmp_path, b"a b c b a " * 50), "tokenizer": upload(tmp_path, described)}
    train(tmp_path, {**TRANSFORMER, "data": data, "steps": 1, "export": {"huggingface": "fp32"}}, test_samples=2)
    folder = DataLayout(tmp_path).job(JOB).artifacts / "huggingface"
    assert (folder / "tokenizer.json").read_bytes() == described
    about = json.loads((folder / "tokenizer_config.json").read_bytes())
    assert about == {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32}
