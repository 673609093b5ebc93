"""Models in uploaded archives, as far as a submit can know them."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from service.formats import archive as archives
from service.formats import weights
from service.formats.llama import uploaded_config
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CheckContext
from service.jobs.records import Problem
from service.jobs.submission.check import check

FILE = "file_" + "0a" * 32
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors of ``LlamaForCausalLM``."""
    dim, width = config["hidden_size"], config["intermediate_size"]
    table = [config["vocab_size"], dim]
    narrow = dim // config["num_attention_heads"] * config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": [dim]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}{name}_layernorm.weight": [dim] for name in ("input", "post_attention")}
        found |= {f"{prefix}self_attn.{name}_proj.weight": [dim, dim] for name in "qo"}
        found |= {f"{prefix}self_attn.{name}_proj.weight": [narrow, dim] for name in "kv"}
        found |= {f"{prefix}mlp.{name}_proj.weight": [width, dim] for name in ("gate", "up")}
        found[f"{prefix}mlp.down_proj.weight"] = [dim, width]
    return found


def safetensors(tensors: dict[str, list[int]]) -> bytes:
    """A file of such tensors, as far as its header."""
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text


def archive(folder: Path, config: Any, files: dict[str, bytes] | None = None) -> Path:
    path = folder / "archive"
    if files is None:
        described = config if isinstance(config, dict) else CONFIG
        files = {"model.safetensors": safetensors(shapes(described))}
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("llama/config.json", config if isinstance(config, bytes) else json.dumps(config))
        for name, content in files.items():
            opened.writestr(f"llama/{name}", content)
    return path


def problems(path: Path, **fields: Any) -> list[Problem]:
    base = {"kind": "train", "model": {"huggingface": FILE}, "data": {"source": "tokens", "sequence": 32}, "steps": 1}
    spec = spec_adapter.validate_python({**base, **fields})
    return check(spec, CheckContext(uploaded=lambda _: uploaded_config(path)))


def test_a_model_that_fits_is_accepted(tmp_path: Path) -> None:
    path = archive(tmp_path, CONFIG)
    assert problems(path, parallel={"tp": 2, "pp": 3}, batch={"global": 12}, export={"huggingface": "bf16"}) == []


@pytest.mark.parametrize(
    ("config", "fields", "path", "message"),
    [
        ({**CONFIG, "vocab_size": 100}, {}, "data.source", "the data has 256 tokens, the model has vocab_size=100"),
        (CONFIG, {"data": {"source": "tokens", "sequence": 65}}, "data.sequence", "longer than .* max_sequence=64"),
        (CONFIG, {"parallel": {"pp": 4}}, "parallel.pp", "has 3 blocks"),
        ({**CONFIG, "model_type": "gpt2"}, {}, "model.huggingface", "model_type='gpt2'; expected 'llama'"),
        (b"no json", {}, "model.huggingface", "Expecting value"),
        (b"\xff\xfe\xfd", {}, "model.huggingface", "."),
        ([], {}, "model.huggingface", "holds a list; expected an object"),
        (b"[" * 100_000, {}, "model.huggingface", "config.json is nested too deeply"),
        (b"[" * 980 + b"]" * 980, {}, "model.huggingface", "config.json"),
        (b" " * (2**20 + 1), {}, "model.huggingface", "config.json has 1048577 bytes; at most 1048576"),
        ({**CONFIG, "rope_scaling": "llama3"}, {}, "model.huggingface", "rope_scaling='llama3'; expected an object"),
        ({**CONFIG, "rope_parameters": [1]}, {}, "model.huggingface", r"rope_parameters=\[1\]; expected an object"),
        ({**CONFIG, "rope_parameters": 5}, {}, "model.huggingface", "rope_parameters=5; expected an object"),
        ({**CONFIG, "head_dim": {}}, {}, "model.huggingface", "head_dim"),
    ],
)
def test_one_that_does_not_is_refused_at_submit(
    tmp_path: Path, config: Any, fields: dict[str, Any], path: str, message: str
) -> None:
    found = problems(archive(tmp_path, config), **fields)
    assert path in [problem.path for problem in found]
    named = next(problem for problem in found if problem.path == path)
    assert re.search(message, named.message), named.message


WHOLE = safetensors(shapes(CONFIG))
WRAPPED = safetensors({f"module._orig_mod.{name}": shape for name, shape in shapes(CONFIG).items()})
COMPILED = safetensors({name.replace(".mlp", "._orig_mod.mlp"): shape for name, shape in shapes(CONFIG).items()})
FIRST, *OTHERS = shapes(CONFIG)
INDEX = json.dumps({"weight_map": dict.fromkeys(shapes(CONFIG), "a.safetensors") | {FIRST: "b.safetensors"}}).encode()


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": WHOLE, "consolidated.safetensors": safetensors({"tok_embeddings.weight": [256, 32]})},
        {"model.safetensors": WHOLE, "adapter_model.safetensors": safetensors({"lora_A": [2, 2]})},
        {
            "model.safetensors.index.json": INDEX,
            "a.safetensors": safetensors({name: shapes(CONFIG)[name] for name in OTHERS}),
            "b.safetensors": safetensors({FIRST: shapes(CONFIG)[FIRST]}),
            "consolidated.safetensors": WHOLE,
        },
        {
            "model.safetensors.index.json": INDEX,
            "a.safetensors": safetensors({**shapes(CONFIG), FIRST: [1]}),  # a stale copy, which the index does not name
            "b.safetensors": safetensors({FIRST: shapes(CONFIG)[FIRST]}),
        },
        {"weights.safetensors": WHOLE},
        {"model.safetensors": WRAPPED},
        {"model.safetensors": COMPILED},
    ],
)
def test_only_the_files_of_the_model_count(tmp_path: Path, files: dict[str, bytes]) -> None:
    assert problems(archive(tmp_path, CONFIG, files)) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no .safetensors file beside config.json"),
        (
            {"model.safetensors.index.json": INDEX, "a.safetensors": WHOLE},
            "names b.safetensors, which",
        ),
        ({"model.safetensors.index.json": b"[]", "a.safetensors": WHOLE}, "has no weight_map"),
        ({"a.safetensors": WHOLE, "b.safetensors": WHOLE}, "is in several files"),
        ({"a.safetensors": safetensors({**shapes(CONFIG), f"module.{FIRST}": [256, 32]})}, "has a tensor twice, with"),
        ({"model.safetensors": safetensors({name: [1] for name in OTHERS})}, rf"has no tensor {FIRST} \(and lacks 1"),
        ({"model.safetensors": safetensors({**shapes(CONFIG), "x.bias": [1]})}, "has x.bias, which a model of this"),
        ({"model.safetensors": safetensors({**shapes(CONFIG), FIRST: [255, 32]})}, r"has shape \(255, 32\); this"),
        ({"model.safetensors": WHOLE.replace(b'"F32"', b'"I32"', 1)}, rf"has '{FIRST}' of the type I32; expected one"),
        ({"model.safetensors": b"no"}, "its header would have"),
        ({"model.safetensors": (9).to_bytes(8, "little") + b"no header"}, "is no safetensors file"),
    ],
)
def test_weights_of_another_model_are_refused_at_submit(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    (found,) = problems(archive(tmp_path, CONFIG, files))
    assert found.path == "model.huggingface"
    assert re.search(message, found.message), found.message


def test_a_sequence_that_a_pipeline_cannot_pass_on_is_refused_at_submit(tmp_path: Path) -> None:
    asked = {"data": {"source": "tokens", "sequence": 31}, "batch": {"global": 12}}
    path = archive(tmp_path, CONFIG)
    (found,) = problems(path, **asked, parallel={"pp": 2, "tp": 2})
    assert (found.path, found.got, found.expected) == ("data.sequence", 31, "a multiple of 2")
    assert problems(path, **asked, parallel={"tp": 2}) == problems(path, **asked, parallel={"pp": 2}) == []


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_is_refused_at_submit(tmp_path: Path, method: int) -> None:
    path = tmp_path / "archive"
    with zipfile.ZipFile(path, "w", method) as opened:
        opened.writestr("config.json", json.dumps(CONFIG))
    content = bytearray(path.read_bytes())
    first = 30 + len("config.json")  # behind the member's header
    content[first : first + 60] = b"\xff" * 60
    path.write_bytes(content)
    assert [problem.path for problem in problems(path)] == ["model.huggingface"]


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(record: str) -> bytes:
    content = f"{len(record) + 4} {record}\n".encode()
    return header("pax", len(content), tarfile.XHDTYPE) + content.ljust(512, b"\0") + header("config.json", 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("config.json", -512), "the size -512; expected 0 to"),
        (header("config.json", -(2**60)), "the size -1152921504606846976; expected 0 to"),
        (header("config.json", 2**70), "expected 0 to"),
        (pax("size=-512"), "the size -512; expected 0 to"),
        (pax("size=-0001024"), "the size -1024; expected 0 to"),
        (header("././@LongLink", -512, tarfile.GNUTYPE_LONGNAME), "the size -512; expected 0 to"),
        (header("././@LongLink", 2**40, tarfile.GNUTYPE_LONGNAME), "expected 65536 at most"),
        (header("././@LongLink", 0, tarfile.GNUTYPE_LONGNAME) * 3000 + header("config.json", 0), "damaged"),
        (pax("GNU.sparse.size=x"), "damaged"),
    ],
)
def test_a_tar_with_a_header_that_leads_nowhere_is_refused_at_submit(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "archive").write_bytes(content + bytes(1024))
    (problem,) = problems(tmp_path / "archive")
    assert problem.path == "model.huggingface"
    assert message in problem.message


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_archives_of_very_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 5)
    for count, expected in ((5, []), (6, ["the archive has more than 5 members"])):
        files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": WHOLE}
        files |= {f"{index}.txt": b"" for index in range(count - 2)}
        path = tmp_path / f"{count}.{form}"
        if form == "zip":
            with zipfile.ZipFile(path, "w") as opened:
                for name, content in files.items():
                    opened.writestr(name, content)
        else:
            with tarfile.open(path, "w:") as tar:
                for name, content in files.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        assert [problem.message for problem in problems(path)] == expected


def test_the_trouble_of_the_machine_is_no_damage_of_the_archive(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        weights.read_text(tmp_path / "none", weights.CONFIG)
