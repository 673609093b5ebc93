"""The rank program of the kind ``estimate``."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from service.parallel import distributed
from trivet.plugins import Completion, RunContext
from trivet_example.estimate import EstimateSpec


def run(spec: EstimateSpec, context: RunContext) -> dict[str, Any] | None:
    """Count points on every rank; rank 0 returns the estimate."""
    distributed.start(context.device_type)
    generator = torch.Generator().manual_seed(spec.seed + context.rank)
    share = spec.points // (context.world_size * spec.rounds)
    inside, done, estimate = torch.zeros((), dtype=torch.int64), 0, 0.0
    while done < spec.rounds and not context.should_stop():
        hits = (torch.rand(share, 2, generator=generator).square().sum(dim=1) <= 1).sum()
        if dist.is_initialized():
            dist.all_reduce(hits)
        inside += hits
        done += 1
        estimate = 4 * int(inside) / (done * share * context.world_size)
        if context.rank == 0:
            context.report.metric(done, {"estimate": estimate})
            context.report.progress(done, spec.rounds, "rounds")
    distributed.stop()
    if context.rank != 0:
        return None
    context.paths.artifacts.mkdir(parents=True, exist_ok=True)
    report = context.paths.artifacts / "estimate.json"
    report.write_text(json.dumps({"estimate": estimate, "inside": int(inside)}))
    context.report.artifact(report, "application/json")
    return {"estimate": estimate, "completed": Completion(done=done, total=spec.rounds, unit="rounds")}
