"""Runs a rank of ``benchmarks/train.py``: the training job's own step, on random tokens, without a service."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_profile import profiled
from train_rows import SEQUENCE, SMOKE_SEQUENCE, Row

from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.train import TrainSpec
from service.models.data import Dataset, Split
from service.models.parallelize import ModelRecipe
from service.models.registry import outline
from service.parallel import distributed
from service.parallel import mesh as meshes
from service.training.loop import Loop
from service.training.setup import TrainingInputs, assemble, check_batch

GIB = 2**30
BATCHES = 4
PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200 (SXM)."""


def random_tokens(samples: int, sequence: int, vocabulary: int, device: torch.device) -> Dataset:
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(vocabulary, (samples, sequence + 1), device=device, generator=generator)
    split = Split(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return Dataset(split, split, "random")


def loop_of(row: Row, folder: Path, device: torch.device, *, smoke: bool, steps: int) -> Loop:
    """The job's loop over this row's mesh; random tokens stand for its data."""
    spec = TrainSpec.model_validate(row.spec(smoke=smoke, steps=steps))
    check_batch(spec)
    launch = distributed.read_launch(os.environ)
    context = RunContext(
        job_id="job_benchmark",
        attempt=1,
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        device_type="cpu" if smoke else "cuda",
        data=DataLayout(folder),
        report=NullReporter(),
        should_stop=lambda: False,
    )
    config = spec.model
    assert isinstance(config, TransformerConfig)
    sequence = SMOKE_SEQUENCE if smoke else SEQUENCE
    mesh = meshes.build(spec.parallel, device.type)
    inputs = TrainingInputs(
        outline=outline(config, mesh.tp),
        dataset=random_tokens(BATCHES * spec.batch.global_, sequence, config.vocab_size, device),
        compile_modes={"train": row.backend(smoke=smoke)} if row.compiled else {},
        recipe=ModelRecipe.from_spec(spec),
        state=torch.bfloat16 if row.bf16_state else torch.float32,
    )
    return Loop(assemble(spec, context, device, mesh, inputs))


def measure(row: Row, folder: Path, *, smoke: bool, steps: int, warmup: int, profile: Path | None) -> dict[str, Any]:
    """Seconds of each step after ``warmup`` and the figures from their median; the largest peak of all ranks."""
    began = time.perf_counter()
    device = distributed.start("cpu" if smoke else "cuda")
    loop = loop_of(row, folder, device, smoke=smoke, steps=steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ready = time.perf_counter()
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(loop.advance().loss)
        seconds.append(time.perf_counter() - start)
    peaks = _peaks(device)
    if profile is not None:
        profiled(loop.advance, device, profile, rank=loop.context.rank)
    return {
        **_figures(loop, statistics.median(seconds[warmup:])),
        "row": row.name,
        "gpus": row.gpus,
        "gib": max(peaks),
        "gib_per_rank": peaks,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "setup_s": ready - began,
        "compile_s": seconds[0],
        "seconds": seconds,
    }


def _figures(loop: Loop, seconds: float) -> dict[str, Any]:
    training = loop.training
    spec, config = training.spec, training.outline.config
    assert isinstance(config, TransformerConfig)
    sequence = training.dataset.train.inputs.shape[1]
    tokens_per_s = spec.batch.global_ / spec.parallel.world_size * sequence / seconds
    matrices = training.outline.elements - config.vocab_size * config.dim
    flops = (6 * matrices + 12 * config.layers * config.dim * sequence) * tokens_per_s
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "parameters": training.outline.elements,
        "step_s": seconds,
        "tokens_per_s": tokens_per_s,
        "tflops": flops / 1e12,
        "mfu": flops / PEAK,
    }


def _peaks(device: torch.device) -> list[float]:
    own = torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else 0.0
    if not dist.is_initialized():
        return [own]
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, own)
    return [float(peak) for peak in peaks]


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    result = measure(
        Row(**given["row"]),
        folder,
        smoke=given["smoke"],
        steps=given["steps"],
        warmup=given["warmup"],
        profile=folder / "profile.txt" if given["profile"] else None,
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    distributed.stop()


if __name__ == "__main__":
    main()
