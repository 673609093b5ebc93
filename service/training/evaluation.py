"""Metrics over the test split."""

from __future__ import annotations

import torch
import torch.distributed as dist

from service.training.setup import Training


def evaluate(training: Training) -> dict[str, float]:
    """Return ``eval_loss`` with ``eval_accuracy`` (classes) or ``eval_perplexity`` (tokens); all ranks call this and
    agree.
    """
    totals = torch.zeros(training.objective.measures, dtype=torch.float64, device=training.device)
    samples = len(training.dataset.test)
    if (most := training.spec.evaluate.samples) is not None:
        samples = min(samples, most)
    for rows, valid in batches(samples, training.order.global_batch, training.mesh.dp.rank, training.mesh.dp.size):
        batch = training.dataset.test.take(rows).to(training.device)
        training.boundary.step_boundary()
        totals += training.engine.evaluate(batch, valid)
    totals /= training.mesh.tp.size  # ranks of a tensor-parallel group have computed the same
    if dist.is_initialized():
        dist.all_reduce(totals)
    return training.objective.summary(totals, samples)


def batches(samples: int, global_batch: int, rank: int, ranks: int) -> list[tuple[torch.Tensor, int]]:
    """Return the row indices of each batch for data-parallel ``rank``, and how many of them, from the first, count.

    Every rank gets the same number of batches, all of one size (the last padded), so that collectives stay paired
    and nothing is compiled for a rest.
    """
    share = global_batch // ranks
    starts = range(rank * share, -(-samples // global_batch) * global_batch, global_batch)
    return [
        (torch.arange(start, start + share).clamp(max=samples - 1), min(max(samples - start, 0), share))
        for start in starts
    ]
