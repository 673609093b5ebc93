"""What the store's tests submit, and under which limits."""

from __future__ import annotations

from typing import Any

from service.jobs.spec.train import TrainSpec
from service.jobs.store import StoreLimits

LIMITS = StoreLimits(
    lease_s=3600,
    starting_lease_s=3600,
    heartbeat_s=3600,
    redispatch_s=3600,
    max_queue_bypass_s=600,
    max_lost_attempts=2,
)
"""Nothing ends by itself however slow the machine is; tests end it by rewriting a score."""


def train(ranks: int = 1, **fields: Any) -> TrainSpec:
    """A small valid training spec over ``ranks`` data-parallel ranks."""
    return TrainSpec.model_validate(
        {
            "model": {"family": "mlp", "in_features": 64, "out_features": 10},
            "data": {"source": "digits"},
            "steps": 1,
            "batch": {"global": ranks},
            "parallel": {"dp_shard": ranks},
            **fields,
        }
    )
