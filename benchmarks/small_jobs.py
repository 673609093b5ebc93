"""The small job that several benchmarks submit: what counts is the service around it."""

from __future__ import annotations

from typing import Any


def small_job(steps: int, **fields: Any) -> dict[str, Any]:
    """Return the spec of a training on digits, on a CPU unless ``fields`` say otherwise."""
    job = {
        "kind": "train",
        "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
        "data": {"source": "digits"},
        "steps": steps,
        "batch": {"global": 8},
        "device": "cpu",
    }
    return {**job, **fields}
