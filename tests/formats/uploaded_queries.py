"""Queries, networks and archives to be uploaded, and what the check says of them."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from service.formats.vnnlib import VnnlibError
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CheckContext
from service.jobs.records import Problem
from service.jobs.submission.check import check

MODEL, FIRST, SECOND = ("file_" + digit * 64 for digit in "123")
MLP = {"family": "mlp", "in_features": 2, "hidden": [4], "out_features": 1}


def refusal(read: Callable[[str], object], text: str) -> str:
    """What is said of a text; empty where it is read."""
    try:
        read(text)
    except VnnlibError as error:
        return str(error)
    return ""


def query(inputs: int = 2, outputs: int = 1, rest: str = "(assert (<= Y_0 0))") -> str:
    names = [*(f"X_{index}" for index in range(inputs)), *(f"Y_{index}" for index in range(outputs))]
    box = [f"(assert (<= X_{index} 1))\n(assert (>= X_{index} 0))" for index in range(inputs)]
    return "\n".join([*(f"(declare-const {name} Real)" for name in names), *box, rest])


def network(inputs: int = 2, outputs: int | None = 1, **fields: Any) -> bytes:
    """``y = x · weight``, or what another ``operator`` makes of these; without ``outputs`` the file does not say how
    many there are.
    """
    size = outputs or 1
    weight = helper.make_tensor("weight", TensorProto.FLOAT, (inputs, size), [1.0] * inputs * size)
    graph = helper.make_graph(
        [helper.make_node(fields.get("operator", "MatMul"), ["x", "weight"], ["y"], name="first")],
        "g",
        [helper.make_tensor_value_info("x", fields.get("kind", TensorProto.FLOAT), ("batch", inputs))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", outputs))],
        [weight],
    )
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", fields.get("opset", 17))]
    ).SerializeToString()
    return content


def zipped(members: dict[str, bytes | str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def tarred(members: dict[str, bytes | str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def problems(tmp_path: Path, files: dict[str, bytes | str], **fields: Any) -> list[Problem]:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    spec = spec_adapter.validate_python(
        {"kind": "verify", "model": {"onnx": MODEL}, "property": {"vnnlib": FIRST}, **fields}
    )
    return check(spec, CheckContext(path_of=lambda file: tmp_path / file))


PAIRS: dict[str, bytes | str] = {
    "a.onnx": network(),
    "b.onnx": network(3),
    "q.vnnlib": query(),
    "three.vnnlib": query(3),
}


PAIRED: dict[str, Any] = {"model": None, "property": {"instances": SECOND}}
