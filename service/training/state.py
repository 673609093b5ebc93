"""Names the tensors of a run for checkpoints, and exports the finished model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

from service.jobs.atomic import atomic_draft, atomic_write
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.train import ExportSpec
from service.models import FamilyConfig, huggingface
from service.parallel import checkpoint
from service.parallel.tensor.placement import global_parameters, global_rows

MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _named_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank's stages under their global names.

    Of a tied parameter whose two copies are both here, only the first is given.
    """
    known: set[str] = set()
    for module in modules:
        for name, parameter in global_parameters(module):
            if name not in known:
                known.add(name)
                yield name, parameter


def model_tensors(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    return {f"{MODEL_PREFIX}{name}": parameter.detach() for name, parameter in _named_parameters(modules)}


def training_tensors(modules: Iterable[nn.Module], optimizer: AdamW) -> dict[str, Tensor]:
    """Return the model and AdamW moments, as views: loading into them restores the run.

    AdamW's step count isn't among them. It is the same for every parameter, so the checkpoint's step says it
    (see :func:`prime`).
    """
    modules = list(modules)
    moments = {
        f"{_OPTIMIZER_PREFIX}{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in _named_parameters(modules)
        for moment in _MOMENTS
    }
    return model_tensors(modules) | moments


def training_rows(modules: Iterable[nn.Module]) -> dict[str, int]:
    """Return, by the same names, the rows without padding of each padded tensor."""
    known = {name: rows for module in modules for name, rows in global_rows(module).items()}
    moments = {f"{_OPTIMIZER_PREFIX}{moment}.{name}": rows for name, rows in known.items() for moment in _MOMENTS}
    return {f"{MODEL_PREFIX}{name}": rows for name, rows in known.items()} | moments


def prime(optimizer: AdamW, step: int) -> None:
    """Give AdamW the state that it would have created by ``step``, so that a checkpoint can be loaded into it."""
    on_device = bool(optimizer.defaults["fused"] or optimizer.defaults["capturable"])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = torch.tensor(float(step), device=parameter.device if on_device else "cpu")
            zeros = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": count, **zeros}


def export_model(
    saved: checkpoint.Checkpoint, folder: Path, config: FamilyConfig, origin: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write ``model.safetensors`` (whole tensors, plain names) and ``model.json`` from a checkpoint; no collective.

    ``model.json`` is ``{step, config, parallel, data_sha256}``.
    Each file appears complete or not at all, the weights first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, about = folder / "model.safetensors", folder / "model.json"
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.load_whole(saved.path, MODEL_PREFIX).items()}
    with atomic_draft(weights) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
    description = {"step": saved.step, "config": config.model_dump(mode="json"), **origin}
    atomic_write(about, json.dumps(description, indent=2).encode())
    return weights, about


def check_export(export: ExportSpec, config: FamilyConfig) -> None:
    """Raise ``ValueError`` if the model cannot be written in the form that the spec asks for."""
    if export.huggingface is not None and not isinstance(config, TransformerConfig):
        raise ValueError(
            f"export.huggingface={export.huggingface!r} needs a transformer; this model is of family {config.family!r}"
        )


def export_huggingface(
    weights: Path, config: FamilyConfig, dtype: Literal["fp32", "bf16"], tokenizer: Path | None = None
) -> Path:
    """Write the folder ``huggingface`` from, and beside, ``model.safetensors``; see :func:`huggingface.write`."""
    folder = weights.with_name("huggingface")
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"expected a transformer, got {type(config).__name__}")
    huggingface.write(folder, config, load_file(weights), dtype, tokenizer)
    return folder
