"""Writes a model as an ONNX file, and lets onnxruntime compare the file with the module."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn

from service.jobs.files import atomic_draft
from service.jobs.runtime import RefusedError
from service.models.data import Dataset
from service.models.outline import ModelOutline
from service.models.randomness import seeded
from service.models.registry import FamilyConfig, build
from service.torch_internals.table import internal_if_there

_LARGEST_BYTES = 2_000_000_000
"""A file of ONNX is one message of protobuf, of less than 2 GiB."""
_MOST_COMPARED = 16
_TOLERANCE = 1e-4
"""The largest difference of an output that is rounding, as a part of the largest output."""


class OnnxRefusedError(RefusedError, ValueError):
    """A model cannot be written as ONNX, or the file computes something else."""


def compared_samples(dataset: Dataset) -> Tensor:
    """Return the inputs with which an exported model is compared, of the samples to test with if there are any."""
    samples = dataset.test if len(dataset.test) else dataset.train
    return samples.take(torch.arange(min(len(samples), _MOST_COMPARED))).inputs


def try_onnx(outline: ModelOutline, dataset: Dataset) -> None:
    """Raise :class:`OnnxRefusedError` if a model of this outline, of any weights, cannot be written as ONNX."""
    samples = compared_samples(dataset)
    size = 4 * outline.state_elements
    if size > _LARGEST_BYTES:
        raise _refused(outline.config, f"its weights are {size / 1e9:.1f} GB, and an ONNX file holds 2 GB")
    with tempfile.TemporaryDirectory(prefix="trivet-onnx-") as folder:
        write_onnx(outline.config, new_model(outline.config), samples, Path(folder) / "model.onnx")


def new_model(config: FamilyConfig) -> nn.Module:
    """Return a model to be written: in float32, in evaluation mode."""
    with seeded(0, "onnx"):
        return build(config, device="cpu").eval()


def write_onnx(config: FamilyConfig, model: nn.Module, samples: Tensor, path: Path) -> float:
    """Write a :func:`new_model`, with any number of samples at a time: ``input`` to ``output``.

    The file appears only once onnxruntime computes from it what the module computes from ``samples``, all and one of
    them; returns the largest relative difference. Raises :class:`OnnxRefusedError`.
    """
    inputs = samples.detach().cpu()
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    with atomic_draft(path) as draft:
        _export(config, model, inputs, draft)
        return max(_difference(config, model, each, draft) for each in (inputs, inputs[:1]))


def _export(config: FamilyConfig, model: nn.Module, inputs: Tensor, path: Path) -> None:
    if (show_graphs := internal_if_there("torch._C._jit_set_onnx_log_enabled")) is not None:
        show_graphs(False)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this exporter needs no further package; the newer one does
            torch.onnx.export(
                model,
                (inputs,),
                str(path),
                input_names=["input"],
                output_names=["output"],
                dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
                dynamo=False,
            )
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refused(config, f"{type(error).__name__}: {said}") from error


def _difference(config: FamilyConfig, model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Return by how much onnxruntime's outputs differ from the module's, relative to the largest of those."""
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])
    except Exception as error:  # of classes that onnxruntime does not name
        said = str(error).strip().splitlines()[0]
        raise _refused(config, f"onnxruntime does not run it for {len(inputs)} samples: {said}") from error
    with torch.no_grad():
        wanted = model(inputs)
    if found.shape != wanted.shape or not bool(wanted.isfinite().all()):
        what = f"outputs {tuple(found.shape)}, and the module's are {tuple(wanted.shape)}"
        raise _refused(config, f"the file has {what}" if found.shape != wanted.shape else "outputs are not finite")
    largest = float(wanted.abs().max())
    difference = float((found - wanted).abs().max())
    if not difference <= _TOLERANCE * largest:
        raise _refused(config, f"onnxruntime's outputs differ by {difference:.3g}, where the largest is {largest:.3g}")
    return difference / largest if largest else 0.0


def _refused(config: FamilyConfig, why: str) -> OnnxRefusedError:
    return OnnxRefusedError(f"export.onnx: a model of family {config.family!r} cannot be written as ONNX: {why}")
