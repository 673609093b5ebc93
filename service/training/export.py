"""The finished model as one safetensors file that needs no knowledge of layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from service.models import FamilyConfig
from service.parallel import checkpoint
from service.training.state import MODEL_PREFIX


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
    save_file(tensors, _working(weights), metadata={"format": "pt"})
    _working(weights).replace(weights)
    description = {"step": saved.step, "config": config.model_dump(mode="json"), **origin}
    _working(about).write_text(json.dumps(description, indent=2))
    _working(about).replace(about)
    return weights, about


def _working(path: Path) -> Path:
    return path.with_name(f".{path.name}")
