"""Computes the learning rate of each step."""

from __future__ import annotations

import math

from service.jobs.spec.train import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, peak: float, step: int, steps: int) -> float:
    """Return the rate of ``step`` (from 0) in a run of ``steps``.

    It rises linearly to ``peak`` over ``warmup`` steps, the first of which is not zero; then it stays, or falls
    along half a cosine (Loshchilov & Hutter, 2017) to ``floor · peak`` at the last step.
    """
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.decay == "constant":
        return peak
    span = steps - 1 - schedule.warmup
    progress = (step - schedule.warmup) / span if span > 0 else 0.0
    return peak * (schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * progress)))
