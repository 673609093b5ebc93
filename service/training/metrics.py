"""Computes the metrics of one step, by the names of the interface."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from service.training.setup import Training, peak_flops
from service.training.step_totals import StepTotals


@dataclass(frozen=True)
class Timing:
    """Says how long a step took on this rank, in seconds, and for how much of that it waited for its batch."""

    seconds: float
    data_wait: float


def step_metrics(training: Training, totals: StepTotals, rate: float, timing: Timing) -> dict[str, float]:
    """Return the metrics of a step by name: times and throughput of it alone, ``tflops`` and ``mfu`` per device.

    ``data_wait_fraction`` is the share of the step in which the first rank waited for its batch; ``bubble_fraction``
    the share of a pipeline's run in which devices computed nothing (on CUDA that of the step before).
    """
    seconds = timing.seconds
    samples, tokens = training.spec.batch.global_, training.dataset.train.sequence
    flop = training.config.flop_per_sample(training.parameters, tokens or 1) * samples
    flops = flop / seconds / training.spec.parallel.world_size
    metrics = {
        "loss": totals.loss,
        "grad_norm": totals.grad_norm,
        "lr": rate,
        "step_ms": seconds * 1e3,
        "data_wait_fraction": timing.data_wait / seconds,
        "tokens_per_s" if tokens else "samples_per_s": samples * (tokens or 1) / seconds,
        "tflops": flops / 1e12,
        "memory_gib": totals.memory_gib,
    }
    if totals.bubble_fraction is not None:
        metrics["bubble_fraction"] = totals.bubble_fraction
    if training.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(training.device))
        metrics |= {"mfu": flops / peak} if peak else {}
    return metrics
