"""Models in uploaded archives, as far as a submit can know them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from service.jobs.checks import check
from service.jobs.llama import uploaded_config
from service.jobs.records import Problem
from service.jobs.spec import spec_adapter

FILE = "file_" + "0a" * 32
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def archive(folder: Path, config: Any) -> Path:
    path = folder / "archive"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("llama/config.json", config if isinstance(config, bytes) else json.dumps(config))
    return path


def problems(path: Path, **fields: Any) -> list[Problem]:
    base = {"kind": "train", "model": {"huggingface": FILE}, "data": {"source": "tokens", "sequence": 32}, "steps": 1}
    spec = spec_adapter.validate_python({**base, **fields})
    return check(spec, None, lambda _: None, uploaded=lambda _: uploaded_config(path))


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
    ],
)
def test_one_that_does_not_is_refused_at_submit(
    tmp_path: Path, config: Any, fields: dict[str, Any], path: str, message: str
) -> None:
    found = problems(archive(tmp_path, config), **fields)
    assert path in [problem.path for problem in found]
    named = next(problem for problem in found if problem.path == path)
    assert re.search(message, named.message), named.message
