"""A live module through the client: what is refused before anything is sent, and what is sent and comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trivet import JobFailed, ModuleRefused
from trivet.live_modules import ModuleCalls


class Recorded(ModuleCalls):
    """A client whose service answers each job with one row."""

    def __init__(self, row: dict[str, Any], state: str = "succeeded") -> None:
        self.row, self.state, self.sent = row, state, b""
        self.spec: dict[str, Any] = {}

    def upload(self, path: Path, *, project: str | None = None) -> Any:
        self.sent = path.read_bytes()
        return SimpleNamespace(id="file_1")

    def submit(self, spec: dict[str, Any], *, project: str | None = None) -> Any:
        self.spec = spec
        return SimpleNamespace(id="job_1")

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Any:
        return SimpleNamespace(id=job_id, state=self.state, error=SimpleNamespace(message="no memory"))

    def bounds(self, job_id: str) -> Any:
        return iter([self.row])


ROW = {"verdict": "verified", "lower": [-2.0, "-Infinity"], "upper": [4, "Infinity"], "margin": 1.0}


def layer() -> nn.Module:
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight)
    return module.eval()


def test_bounds_come_back_as_arrays_in_the_shape_of_the_output() -> None:
    client = Recorded(ROW)
    found = client.verify(
        layer(), ([[0.0, 0.1]], np.ones((1, 2))), conditions=[([1, 0], -3)], method="ibp", name="mine"
    )
    assert found.lower.tolist() == [[-2.0, -np.inf]]
    assert found.upper.tolist() == [[4.0, np.inf]]
    assert (found.verdict, found.margin, found.counterexample) == ("verified", 1.0, None)
    assert client.spec["property"]["box"] == {
        "lower": [0.0, 0.1],
        "upper": [1.0, 1.0],
        "output": [{"coefficients": [1, 0], "threshold": -3}],
    }
    assert (client.spec["model"], client.spec["method"], client.spec["name"]) == ({"onnx": "file_1"}, "ibp", "mine")
    assert client.sent.startswith(b"\x08")


def test_bounds_that_the_live_module_leaves_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="output 0 of the live module is"):
        Recorded(ROW | {"lower": [9.0, 0.0], "upper": [9.5, 9.0]}).verify(layer(), ([[0, 0]], [[1, 1]]))


def test_a_failed_job_says_why() -> None:
    with pytest.raises(JobFailed, match="job job_1 has ended as failed: no memory"):
        Recorded(ROW, "failed").verify(layer(), ([[0, 0]], [[1, 1]]))


def partly_training() -> nn.Module:
    module = nn.Sequential(layer(), nn.Dropout()).eval()
    module[1].train()
    return module


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Measured(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
            r"Sequential: it is in training mode.*expected module\.eval\(\)",
        ),
        (partly_training(), "its part '1' is"),
        (nn.Linear(2, 2).half().eval(), r"weight is torch\.float16; expected float32 or float64"),
        (Pair().eval(), "Pair returns a tuple; expected one tensor"),
        (Measured().eval(), r"Measured cannot be exported at test_live_modules\.py:\d+: .*number or a shape"),
    ],
)
def test_a_module_that_is_not_one_function_is_refused(module: nn.Module, message: str) -> None:
    client = Recorded(ROW)
    with pytest.raises(ModuleRefused, match=message):
        client.verify(module, ([[0, 0]], [[1, 1]]))
    assert client.spec == {}


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (([[0, 0]], [[1]]), "expected \\(lower, upper\\) of the same shapes"),
        ((torch.zeros(3, 2), torch.ones(3, 2)), "expected a first dimension of 1"),
        ((torch.zeros(1, 99), torch.ones(1, 99)), "does not take inputs of the shapes \\[\\(1, 99\\)\\]"),
    ],
)
def test_a_box_that_is_not_of_one_input_is_refused(box: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recorded(ROW).verify(layer(), box)


def test_the_client_needs_torch_for_nothing_else() -> None:
    code = "import sys; sys.modules['torch'] = None; import trivet; trivet.Client; trivet.AsyncClient"
    code += "; sys.exit('service.jobs.spec.compile' in sys.modules)"  # nor does it import every spec
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
