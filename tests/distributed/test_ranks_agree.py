"""Ranks that would wait for each other for ever, because they do not run the same thing, all say so instead."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
    ),
]
pytestmark = pytest.mark.distributed


def disagree(device_type: str) -> dict[str, str]:
    """What each run says in which the second rank does something else than the first; and one in which it does not."""
    import torch
    from pipeline_layouts import CONFIGS, batch

    from service.jobs.spec.common import ParallelSpec
    from service.models import build
    from service.parallel import distributed, mesh
    from service.parallel.collectives import agree
    from service.parallel.pipeline.runtime import PipelineRuntime, Work
    from service.parallel.pipeline.transport import connect
    from service.parallel.tensor import vocabulary_parallel_cross_entropy
    from service.schedules import forward_only, generator

    device = distributed.start(device_type)
    grid = mesh.build(ParallelSpec(pp=2), device_type)
    first = grid.pp.rank == 0
    stage = build(CONFIGS["mlp"], grid, dtype=torch.float64, seed=7).to(device)
    runtime = PipelineRuntime({grid.pp.rank: stage}, grid, device=device)

    def run(name: str = "1f1b", micro_batches: int = 2, key: str = "", trains: bool = True, given: bool = True) -> str:
        x, targets = (each.to(device) for each in batch(CONFIGS["mlp"], 12))
        plan = generator(name)(2, 1, micro_batches)
        plan = plan if trains else forward_only(plan.owners, micro_batches)
        inputs = x.chunk(micro_batches) if given else None
        work = Work(vocabulary_parallel_cross_entropy, inputs, targets.chunk(micro_batches), key=key)
        return said(lambda: runtime.run(plan, work))

    found = {
        "micro-batches": run(micro_batches=4 if first else 2),
        "agreed": run(),
        "micro-batches, later": run(micro_batches=2 if first else 3),
        "schedule": run("1f1b" if first else "zero_bubble"),
        "key": run(key="rows=6" if first else "rows=5"),
        "evaluation": run(trains=first),
        "refused": run(given=not first),
        "stages": said(lambda: connect(grid, (0, 1) if first else (0, 1, 0, 1))),
        "named": said(lambda: agree({"steps": 3} if first else {"rows": 3})),
        "much": said(lambda: agree(dict.fromkeys("abcd", "å" * 5000) | {"rank": grid.rank})),
        "more": said(lambda: agree({"text": "a" * 5000 + str(grid.rank)})),
        "agreed again": run(),
    }
    distributed.stop()
    return found


def said(act: Any) -> str:
    try:
        act()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("device_type", DEVICES)
def test_ranks_that_disagree_all_say_on_what_and_nobody_waits(torchrun: Any, device_type: str) -> None:
    first, second = torchrun(disagree, 2, device_type=device_type)
    refusals = first.pop("refused"), second.pop("refused")
    assert first == second
    disagreed = "DisagreementError: the ranks disagree on"
    assert first["micro-batches"] == f"{disagreed} the number of micro-batches: 4 on rank 0, 2 on rank 1"
    assert first["micro-batches, later"] == f"{disagreed} the number of micro-batches: 2 on rank 0, 3 on rank 1"
    assert re.fullmatch(rf"{disagreed} the schedule: 1f1b \w+ on rank 0, zero_bubble \w+ on rank 1", first["schedule"])
    assert first["key"] == f"{disagreed} the key of the shapes: rows=6 on rank 0, rows=5 on rank 1"
    assert first["evaluation"] == f"{disagreed} what is run: training on rank 0, evaluation on rank 1"
    assert first["stages"] == f"{disagreed} the stages' owners: (0, 1) on rank 0, (0, 1, 0, 1) on rank 1"
    assert first["named"] == f"{disagreed} steps: 3 on rank 0, nothing on rank 1"
    assert first["much"] == f"{disagreed} rank: 0 on rank 0, 1 on rank 1"
    assert first["more"] == f"{disagreed} a value that is too long to be shown"
    assert first["agreed"] == first["agreed again"] == ""
    assert refusals == (
        "ValueError: 0 inputs for 2 micro-batches",
        f"{disagreed} whether it can be run: 0 inputs for 2 micro-batches on rank 0, yes on rank 1",
    )
