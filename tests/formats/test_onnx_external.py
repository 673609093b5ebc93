"""Zips of an ONNX model and the files of its weights."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from onnx import TensorProto, helper, numpy_helper

from service.bounds.onnx import load
from service.formats.onnx import OnnxError, parse

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


def files(tmp_path: Path, location: str = "model.onnx.data") -> dict[str, bytes]:
    """``y = x · WEIGHT``, as exporters store it."""
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in (("x", 2), ("y", 3))
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", value[:1], value[1:], [numpy_helper.from_array(WEIGHT, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(
        model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    content = (tmp_path / "model.onnx").read_bytes().replace(b"model.onnx.data", location.encode())
    return {"model.onnx": content, "model.onnx.data": (tmp_path / "model.onnx.data").read_bytes()}


def zipped(members: dict[str, bytes], folder: str = "") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{folder}{name}", content)
    return made.getvalue()


@pytest.mark.parametrize("folder", ["", "exported/"])
def test_weights_beside_the_model_are_taken_in(tmp_path: Path, folder: str) -> None:
    model = load(zipped(files(tmp_path), folder))
    assert model(torch.tensor([[1.0, 2.0]])).tolist() == [[6.0, 9.0, 12.0]]


def test_a_zip_that_is_not_one_model_with_its_weights_is_refused(tmp_path: Path) -> None:
    known = files(tmp_path)
    refused = {
        "'model.onnx.data', which is not beside the model": {"model.onnx": known["model.onnx"]},
        "has 0 .onnx files; expected one": {"model.onnx.data": b""},
        "lies beyond the end of 'model.onnx.data'": known | {"model.onnx.data": b"short"},
    }
    for words, members in refused.items():
        with pytest.raises(OnnxError, match=words):
            parse(zipped(members))
    with pytest.raises(OnnxError, match="the archive is damaged"):
        parse(zipped(known)[:-40])


def saved_by_torch(*, zipped: bool) -> bytes:
    made = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, made, _use_new_zipfile_serialization=zipped)
    return made.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (saved_by_torch(zipped=True), r"torch\.onnx\.export\(network, sample"),
        (saved_by_torch(zipped=False), r"torch\.onnx\.export\(network, sample"),
        (safetensors.torch.save({"weight": torch.ones(2)}), r"model: \{safetensors: FILE"),
        (b"(declare-const X_0 Real)", r"belongs in property\.vnnlib"),
        (b"\x89HDF\r\n", "tf2onnx"),
    ],
)
def test_a_file_of_another_format_is_told_how_onnx_is_made_of_it(content: bytes, words: str) -> None:
    with pytest.raises(OnnxError, match=words):
        parse(content)


def test_a_path_in_the_model_is_never_one_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match="is kept in 'passwd_abc', which is not beside"):
        parse(zipped(files(tmp_path, "/etc/passwd_abc")))
