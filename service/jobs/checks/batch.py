"""Whether a batch divides over the ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.records import Problem
from service.jobs.spec.train import TrainSpec


def check_batch(spec: TrainSpec) -> Iterator[Problem]:
    """Yield why a global batch is not ``dp × micro-batches × micro`` in whole numbers."""
    dp, batch, micro = spec.parallel.dp, spec.batch.global_, spec.batch.micro
    if batch % dp:
        replicas = f"dp_replicate={spec.parallel.dp_replicate} × dp_shard={spec.parallel.dp_shard} = {dp}"
        yield Problem("batch.global", f"{batch} samples do not divide by {replicas}", batch, f"a multiple of {dp}")
        return
    share = batch // dp
    arithmetic = f"global={batch} / dp={dp} = {share} samples per data-parallel rank"
    asked = spec.pipeline.micro_batches if spec.parallel.pp > 1 else None
    if micro is not None and share % micro:
        message = f"{arithmetic} do not divide by micro={micro}"
        yield Problem("batch.micro", message, micro, f"a divisor of {share}")
    elif micro is not None and asked is not None and micro * asked != share:
        message = f"{arithmetic}, but micro={micro} × micro_batches={asked} = {micro * asked}"
        yield Problem("pipeline.micro_batches", message, asked, f"{share // micro}, or absent")
    elif share % spec.micro_batches:
        message = f"{arithmetic} do not divide by {spec.micro_batches} micro-batches"
        expected = f"a multiple of {dp * spec.micro_batches}, or another pipeline.micro_batches"
        yield Problem("batch.global", message, batch, expected)
