"""Archives and configurations of Llama-style checkpoints: what is taken, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import zipped
from llama_checkpoints import CONFIG, checkpoint_tensors, packed, upload_checkpoint, write_checkpoint
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from training_runs import JOB, TRANSFORMER, train, upload

from service.formats import weights as files
from service.formats.llama import LlamaError, read_config, their_names, write_config
from service.jobs.files import DataLayout
from service.jobs.spec.model import TransformerConfig
from service.models import WeightsError, build, huggingface

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
    "bos_token_id": 1,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
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
        ({"model_type": "qwen2", "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}, 24),
    ],
)
def test_sequences_are_as_long_as_a_sliding_window_changes_nothing(change: dict[str, Any], longest: int) -> None:
    assert read_config({**CONFIG, **change}).max_sequence == longest


@pytest.mark.parametrize(("padding", "token"), [(3, 3), (-1, 95), (None, None)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_of_a_padding_token_does_not_learn(padding: int | None, token: int | None, tied: bool) -> None:
    model = build(read_config({**CONFIG, "pad_token_id": padding, "tie_word_embeddings": tied}), dtype=torch.float64)
    model(torch.tensor([[3, 95, 4]])).logsumexp(-1).sum().backward()
    gradients = model.get_parameter("embedding.weight").grad
    assert gradients is not None
    learning = {row for row in (3, 4, 95) if gradients[row].abs().max() > 0}
    assert learning == ({3, 4, 95} if tied else {3, 4, 95} - {token})


def test_null_is_as_many_heads_of_keys_as_of_queries() -> None:
    for kind in ("llama", "mistral", "qwen2"):
        config = read_config({**CONFIG, "model_type": kind, "num_key_value_heads": None})
        assert config.key_value_heads == CONFIG["num_attention_heads"]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({"rope_scaling": {**LLAMA3, LENGTH: 32}}, 32),
        ({"rope_scaling": {**LLAMA3, LENGTH: 32}, LENGTH: 32}, 32),
        ({"rope_scaling": LLAMA3, LENGTH: 16}, 16),
        ({"rope_scaling": LLAMA3}, 64),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, LENGTH: 16}, 16),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "rope_scaling": {**LLAMA3, "rope_theta": 500.0}}, 64),
    ],
)
def test_the_length_that_was_scaled_from_is_where_their_library_looks(change: dict[str, Any], length: int) -> None:
    scaling = read_config({**CONFIG, **change}).rope_scaling
    assert scaling is not None
    assert (scaling.original_sequence, scaling.factor) == (length, 8.0)


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
        ({"rope_scaling": {"rope_type": "llama3"}}, "no factor for rotary positions of type 'llama3'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "no low_freq_factor for"),
        ({"rope_scaling": {**LLAMA3, LENGTH: 32}, LENGTH: 16}, f"{LENGTH}=16, and 32 among the rotary settings"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "factor=2.0 for rotary positions of type 'default'"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 0.7}}, "attention_factor=0.7 for rotary .* 'llama3'"),
        ({"rope_parameters": {"type": "default"}, "rope_scaling": LLAMA3}, "one of them, or both alike"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta=500.0, and 10000.0 among"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1; expected 0.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0; expected 1.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which our transformer does not know"),
        ({"use_rope": False}, "use_rope=False, which our transformer does not know"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*expected a list of full_attention"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention and no sliding_window"),
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
    (folder / files.INDEX).write_text(json.dumps(index))
    _, weights = huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))
    assert weights.keys() == their_names(read_config(CONFIG)).keys()
    other = {"lm_head.weight": tensors["lm_head.weight"] + 1, "model.norm.weight": torch.zeros(32)}
    save_file(other, folder / "other.safetensors")
    index["weight_map"]["lm_head.weight"] = "other.safetensors"
    (folder / files.INDEX).write_text(json.dumps(index))
    _, weights = huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))
    assert torch.equal(weights["norm.weight"], tensors["model.norm.weight"])
    assert torch.equal(weights["head.weight"], tensors["lm_head.weight"] + 1)
    (folder / files.INDEX).write_text(json.dumps({"weight_map": {"x": "../../model-2.safetensors"}}))
    with pytest.raises(WeightsError, match=r"names model-2.safetensors, which the archive does not have"):
        huggingface.load(upload(tmp_path, packed(folder, "zip")), DataLayout(tmp_path))


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
    files.unpack(tmp_path / "archive", tmp_path / "deep")
    assert {path.name for path in tmp_path.rglob("*")} == {"archive", "deep", "config.json", "x.safetensors"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"config.json", "x.safetensors"}
    assert files.read_text(tmp_path / "archive", "config.json") == b"{}"


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
