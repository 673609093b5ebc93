"""A trained model as an ONNX file: what onnxruntime computes from it, and which models have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import onnxruntime
import pytest
import torch
from launching import Torchrun
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from training_runs import JOB, MLP, TRANSFORMER, Recording, train, upload

from service.jobs.files import DataLayout
from service.jobs.spec.data import DigitsData
from service.models import build, load_into, registry
from service.models.data import load
from service.models.onnx_file import OnnxRefusedError
from service.models.reference import trained
from service.parallel.tensor import OnEveryRank

ONNX: dict[str, Any] = {"steps": 2, "export": {"onnx": True}}
OTHER = "job_" + "u" * 20


class Branching(nn.Module):
    """A trace of it has the branch of the samples with which it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found if len(x) > 1 else 2 * found


class Differences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(63, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.diff(x))
        return found


def own(make: Callable[[], nn.Module], folder: Path, *, job_id: str = JOB, **changes: Any) -> Any:
    """Train a module of somebody's own."""
    families = SimpleNamespace(function=lambda name: lambda config, axis: make())
    with patch.object(registry, "FAMILIES", families):
        return train(folder, {**MLP, **ONNX, **changes}, job_id=job_id, test_samples=4)


def artifacts(folder: Path, job_id: str = JOB) -> Path:
    return DataLayout(folder).job(job_id).artifacts


def by_onnxruntime(path: Path, inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["output"], {"input": inputs.numpy()})[0])


def test_the_file_computes_what_plain_torch_does_with_the_weights(tmp_path: Path) -> None:
    report = Recording()
    train(tmp_path, {**MLP, **ONNX}, report=report, test_samples=4)
    assert artifacts(tmp_path) / "model.onnx" in report.artifacts
    assert any(line.startswith("model.onnx: onnxruntime differs from the module by") for line in report.logs)
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
    network, held = nn.Sequential(*layers), load_file(artifacts(tmp_path) / "model.safetensors")
    names = {"0": "blocks.0.linear", "2": "blocks.1.linear", "4": "head"}
    kinds = ("weight", "bias")
    network.load_state_dict({f"{at}.{kind}": held[f"{name}.{kind}"] for at, name in names.items() for kind in kinds})
    samples = load(DigitsData()).test.take(torch.arange(7)).inputs
    torch.testing.assert_close(by_onnxruntime(artifacts(tmp_path) / "model.onnx", samples), network(samples))
    train(tmp_path, {**MLP, "steps": 2}, job_id=OTHER, test_samples=4)
    plain = load_file(artifacts(tmp_path, OTHER) / "model.safetensors")
    assert all(torch.equal(value, plain[name]) for name, value in held.items()), "an export changes no training"


def test_ones_own_module_takes_the_weights_back_and_so_does_another_job(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), OnEveryRank(nn.Linear(8, 10)))

    own(make, tmp_path)
    module, weights = make(), artifacts(tmp_path) / "model.safetensors"
    load_model(module, weights)
    samples = load(DigitsData()).test.take(torch.arange(7)).inputs
    found = by_onnxruntime(artifacts(tmp_path) / "model.onnx", samples)
    torch.testing.assert_close(found, module.eval()(samples))
    again = {"model": {**MLP["model"], "safetensors": upload(tmp_path, weights.read_bytes())}, "steps": 1}
    own(make, tmp_path, job_id=OTHER, **again, optimizer={"lr": 1e-30})
    after = load_file(artifacts(tmp_path, OTHER) / "model.safetensors")
    assert torch.equal(after["0.weight"], load_file(weights)["0.weight"])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Branching, "onnxruntime's outputs differ by"),
        (Differences, "UnsupportedOperatorError: Exporting the operator 'aten::diff'"),
    ],
)
def test_a_model_that_has_no_such_file_is_refused_before_it_is_trained(
    tmp_path: Path, make: Callable[[], nn.Module], why: str
) -> None:
    with pytest.raises(OnnxRefusedError, match=f"family 'mlp' cannot be written as ONNX: {why}"):
        own(make, tmp_path)
    assert not DataLayout(tmp_path).job(JOB).root.exists()


def train_over_ranks(folder: str) -> None:
    train(folder, {**TRANSFORMER, **ONNX, "parallel": {"tp": 2}}, test_samples=4)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_divided_model_is_gathered(tmp_path: Path, torchrun: Torchrun) -> None:
    torchrun(train_over_ranks, 2, folder=str(tmp_path))
    tokens = torch.randint(0, 256, (3, 32))
    found = by_onnxruntime(artifacts(tmp_path) / "model.onnx", tokens)
    assert found.shape == (3, 32, 256)
    with torch.no_grad():
        torch.testing.assert_close(found, trained_model(tmp_path)(tokens), rtol=1e-4, atol=1e-5)


def trained_model(folder: Path) -> nn.Module:
    config, weights = trained(DataLayout(folder).job(JOB))
    model = build(config)
    load_into(model, weights)
    return model.eval()
