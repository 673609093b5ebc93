"""Uploaded arrays are compared with the spec at submit, by their headers: no job fails on a rank for what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checked_specs import FILE, MLP, TRANSFORMER, spec
from safetensors.numpy import save

from service.jobs.plugins import CheckContext
from service.jobs.records import Problem
from service.jobs.submission.check import check

MODEL = {**MLP, "in_features": 6, "out_features": 4}
SAMPLES = {"inputs": np.zeros((20, 2, 3), np.float32), "targets": np.zeros(20, np.int64)}


def found(path: Path, kind: str = "train", count: int = 4, **fields: Any) -> list[tuple[str, str, str]]:
    """Whatever is wrong with a job on the arrays in the file."""
    data = {"source": "file", "format": "arrays", "file": FILE, "shape": [2, 3], "classes": 4, **fields}
    return [(problem.path, problem.message, problem.expected) for problem in problems(path, kind, MODEL, data, count)]


def problems(path: Path, kind: str, model: dict[str, Any], data: dict[str, Any], count: int = 1) -> Iterator[Problem]:
    asked = {"data": data}
    if kind == "verify":
        asked = {"property": {"robustness": {"data": data, "eps": 0.1, "count": count}}}
    return check(spec(kind, model=model, **asked), CheckContext(path_of=lambda _: path))


def stored(folder: Path, arrays: dict[str, np.ndarray[Any, Any]], form: str = "npz") -> Path:
    path = folder / "content"
    if form == "npz":
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    else:
        path.write_bytes(save(arrays))
    return path


@pytest.mark.parametrize("form", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": None, "labels": np.zeros(20)}, "the file has no array 'targets', but inputs, labels"),
        ({"inputs": np.zeros((20, 3, 2))}, "inputs have shape (20, 3, 2); data.shape says (n, 2, 3)"),
        ({"inputs": np.zeros((20, 2, 3), bool)}, "inputs are bool; expected real numbers"),
        ({"targets": np.zeros(19, np.uint8)}, "of shape (19,); expected one whole number for each of 20 inputs"),
        ({"targets": np.zeros(20)}, "expected one whole number for each of 20 inputs"),
        ({"test_input": np.zeros((3, 2, 3))}, "the file has an array 'test_input'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, form: str, change: dict[str, Any], message: str) -> None:
    path = stored(tmp_path, {name: each for name, each in {**SAMPLES, **change}.items() if each is not None}, form)
    for kind, field in {"train": "data", "compile": "data", "verify": "property.robustness.data"}.items():
        [(where, told, expected)] = found(path, kind)
        assert (where, "numpy.savez" in expected) == (f"{field}.file", True)
        assert message.casefold() in told.casefold()


def test_a_table_of_text_is_no_array_and_the_refusal_says_how_it_becomes_one(tmp_path: Path) -> None:
    (path := tmp_path / "content").write_text("label,p0,p1\n1,0.5,0.25\n")
    [(where, told, expected)] = found(path)
    assert where == "data.file"
    assert told == "the file is neither safetensors nor npz"
    assert "numpy.savez(FILE, inputs=…, targets=…)" in expected
    path.write_bytes(b"PK\x03\x04 and no more")
    assert "is no npz file of numbers" in found(path)[0][1]
    odd = b'{"inputs": {"shape": [1e999], "dtype": ""}}'
    path.write_bytes(len(odd).to_bytes(8, "little") + odd)
    assert found(path)[0][1] == told


def test_no_more_samples_are_asked_for_than_there_are_to_test_with(tmp_path: Path) -> None:
    path = stored(tmp_path, SAMPLES)
    [(where, told, expected)] = found(path, "verify", 5)
    assert (where, told) == ("property.robustness.count", "the test split has 4 samples, the last of 20")
    assert expected == "at most 4, or property.robustness.data.test_fraction: 1 for all 20"
    assert found(path, "verify", 20, test_fraction=1) == found(path, "verify", 20, test_file=FILE) == []
    assert [where for where, *_ in found(path, "verify", 21, test_fraction=1)] == ["property.robustness.count"]
    assert [where for where, *_ in found(path, "train", test_fraction=1)] == ["data.test_fraction"]


def test_rows_of_tokens_are_counted(tmp_path: Path) -> None:
    (path := tmp_path / "content").write_bytes(bytes(2 * 90))  # 89 tokens after the first: five sequences of 16

    def refused(kind: str, count: int = 1, **fields: Any) -> list[tuple[str, str]]:
        row = {"source": "file", "format": "tokens", "file": FILE, "vocabulary": 256, "sequence": 16, **fields}
        return [(problem.path, problem.message) for problem in problems(path, kind, TRANSFORMER, row, count)]

    assert refused("train") == refused("verify") == refused("verify", 5, test_fraction=1) == []
    assert refused("verify", 2) == [("property.robustness.count", "the test split has 1 samples, the last of 5")]
    text = {"encoding": "text", "tokenizer": FILE}  # whose tokens only ranks count
    for fields in ({}, text):
        assert [where for where, _ in refused("train", test_fraction=1, **fields)] == ["data.test_fraction"]
    assert refused("train", **text) == []
    assert refused("train", encoding="npy")[0][1].startswith("the file is no array in NumPy's format")
    path.write_bytes(bytes(33))
    assert refused("train") == [("data.file", "the file has 33 bytes, which are no whole number of uint16 ids")]
    path.write_bytes(bytes(32))
    assert refused("train") == [("data.file", "the file holds 16 tokens; data.sequence=16 needs at least 17")]
