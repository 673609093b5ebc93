"""Specs of training jobs on digits, small where a test does not say otherwise."""

from __future__ import annotations

from typing import Any


def digits_job(*hidden: int, **fields: Any) -> dict[str, Any]:
    """A training job of one step, of a network with hidden layers of these sizes, by default one of 16."""
    model = {"family": "mlp", "in_features": 64, "hidden": list(hidden) or [16], "out_features": 10}
    return {"kind": "train", "model": model, "data": {"source": "digits"}, "steps": 1, **fields}
