"""The file of an exported module: what is refused before a rank would see it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.formats.exported import METADATA, ExportedError, read_exported, source_line
from service.jobs.plugins import CheckContext
from service.jobs.spec.compile import CompileSpec
from service.jobs.submission.check import check

FILE = "file_" + "1" * 64
CALL = {"operator": "aten.mul.Tensor", "args": [{"ref": "$0"}, {"ref": "layer.weight"}]}
TENSORS = {"layer.weight": np.ones(3, np.float32), "$0": np.ones(3, np.float32)}


def written(path: Path, *calls: dict[str, Any], **changes: Any) -> Path:
    """A file of a module that multiplies its input by a weight, with other calls or other fields."""
    graph = {"calls": [*calls] or [CALL], "outputs": ["%0"]}
    about = {"module": "Scale", "tensors": {"layer.weight": "parameter"}, "inputs": 1, "graphs": {"inference": graph}}
    save_file(TENSORS, path, {METADATA: json.dumps(about | changes)})
    return path


def called(operator: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"operator": operator, "args": [*args], "kwargs": kwargs}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (called("os.system", "true"), "calls 'os.system'; expected an operator of ATen"),
        (called("aten.__class__.mro"), "calls aten.__class__.mro, which is not for models"),
        (called("aten.from_file.default", "/etc/passwd"), "calls aten.from_file.default, which is not for models"),
        (called("aten.relu.default", {"ref": "%0"}), "uses '%0' before it is there"),
        (called("aten.to.dtype", {"ref": "$0"}, {"torch": "load"}), "torch's name 'load'; expected one of bfloat16"),
        (called("aten.relu.default", {"call": "x"}), "has a graph with the value {'call': 'x'}"),
        (called("aten.relu.default", x={"ref": ["$0"]}), "has a graph with the value"),
    ],
)
def test_a_graph_calls_only_operators_on_what_it_has(call: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportedError) as refused:
        read_exported(written(tmp_path / "file", call))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": {"other": "buffer"}}, "lacks the tensor 'other'"),
        ({"tensors": {"$0": "buffer"}}, "a tensor named '$0'; expected a path of attributes"),
        ({"inputs": 2}, "lacks the tensor '$1'"),
        ({"graphs": {}}, "has a graph that cannot be read"),
        ({"code": "x"}, "has a graph that cannot be read"),
    ],
)
def test_a_header_is_complete_and_has_nothing_else(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportedError) as refused:
        read_exported(written(tmp_path / "file", **changes))
    assert message in str(refused.value)


def test_a_file_of_another_kind_is_refused_when_a_job_is_submitted(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights")
    (tmp_path / "text").write_text("text")
    written(tmp_path / "inference")

    def problems(name: str, **fields: Any) -> list[tuple[str, str]]:
        spec = CompileSpec.model_validate({"program": {"name": "exported", "file": FILE}, **fields})
        context = CheckContext(path_of=lambda _: tmp_path / name)
        return [(problem.path, problem.message) for problem in check(spec, context)]

    assert [path for path, _ in problems("text")] == ["program.file"]
    assert problems("weights") == [
        ("program.file", "it holds tensors without a graph; client.compile_check(module, example) writes one")
    ]
    assert problems("inference") == [("phases", "the module was exported for inference only")]
    assert problems("inference", phases=["inference"]) == []
    assert [path for path, _ in problems("inference", phases=["inference"], parallel={"tp": 2})] == ["parallel"]


def test_a_line_of_code_that_speaks_of_a_file_is_no_place() -> None:
    trace = '  File "/home/user/net.py", line 7, in forward\n    x = x + 1.0  # File format of version 2\n'
    assert source_line(SimpleNamespace(meta={"stack_trace": trace})) == "net.py:7"
