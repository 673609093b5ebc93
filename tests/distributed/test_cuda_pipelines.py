"""Every schedule over NCCL, which has no tags, against one process. Needs a machine with several GPUs."""

from __future__ import annotations

import faulthandler
import time
from typing import Any

import pytest
import torch
from launching import GroupFailureError
from pipeline_layouts import CONFIGS, TOLERANCE, batch, build_stages, run_layout
from torch import Tensor

from service.jobs.spec.common import ParallelSpec
from service.parallel import distributed, mesh
from service.parallel.pipeline.runtime import PipelineRuntime, Work
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.schedules import GENERATORS, generator

GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"two ranks over NCCL need 2 GPUs; this machine has {GPUS}")
needs_four = pytest.mark.skipif(GPUS < 4, reason=f"four ranks over NCCL need 4 GPUs; this machine has {GPUS}")
pytestmark = [pytest.mark.distributed, pytest.mark.cuda]


def two_ranks() -> dict[str, Any]:
    device = distributed.start("cuda")
    found = {
        f"pp2 {name} {family}": run_layout(
            family, ParallelSpec(pp=2), name, 5, recompute=family == "transformer", device=device
        )
        for name in GENERATORS
        for family in ("transformer", "mlp")
    }
    found["shapes"] = changing_shapes(device)
    distributed.stop()
    return found


def changing_shapes(device: torch.device) -> dict[str, Any]:
    """Losses of one batch cut in different ways, one after another through one runtime: all are the whole's."""
    config, plan = CONFIGS["mlp"], generator("zbv")(2, 2, 3)
    grid = mesh.build(ParallelSpec(pp=2), device.type)
    stages = build_stages(config, grid, plan, device)
    runtime = PipelineRuntime(stages, grid, device=device, owners=plan.owners)
    losses = []
    for rows in (4, 7, 4):
        x, targets = batch(config, 3 * rows, device.type)
        work = Work(vocabulary_parallel_cross_entropy, x.chunk(3), targets.chunk(3), key=rows)
        losses += [float(value) for value in runtime.run(plan, work)]
    return {"worst": max((abs(first - last) for first, last in zip(losses[:3], losses[6:], strict=True)), default=0.0)}


LAYOUTS_OF_FOUR = {
    "pp4": ("deep", ParallelSpec(pp=4), 16, False),
    "pp2 fsdp2": ("transformer", ParallelSpec(pp=2, dp_shard=2), 4, True),
    "pp2 tp2": ("transformer", ParallelSpec(pp=2, tp=2), 4, False),
}


def four_ranks(layout: str) -> dict[str, Any]:
    """All schedules over one mesh: a job never has two, and NCCL's groups of a second one may not connect."""
    family, spec, micro_batches, shard = LAYOUTS_OF_FOUR[layout]
    # A schedule that hangs tells where.
    faulthandler.dump_traceback_later(120, exit=True)
    device = distributed.start("cuda")
    grid = mesh.build(spec, device.type)
    found = {
        name: run_layout(family, spec, name, micro_batches, shard=shard, reshard=not shard, device=device, grid=grid)
        for name in GENERATORS
    }
    distributed.stop()
    faulthandler.cancel_dump_traceback_later()
    return found


def failing_rank() -> None:
    device = distributed.start("cuda")
    config, plan = CONFIGS["mlp"], generator("zbv")(2, 2, 4)
    grid = mesh.build(ParallelSpec(pp=2), device.type)
    runtime = PipelineRuntime(build_stages(config, grid, plan, device), grid, device=device, owners=plan.owners)

    def objective(output: Tensor, target: Tensor) -> Tensor:
        raise FloatingPointError("loss is not finite")

    x, targets = batch(config, 4, device.type)
    runtime.run(plan, Work(objective, x.chunk(4), targets.chunk(4)))


def assert_equal(results: list[dict[str, Any]]) -> None:
    for rank, layouts in enumerate(results):
        for name, layout in layouts.items():
            assert layout["worst"] < TOLERANCE, (rank, name, layout)


@needs_two
def test_two_stages_over_nccl(fresh_torchrun: Any) -> None:
    assert_equal(fresh_torchrun(two_ranks, ranks=2))


@needs_four
@pytest.mark.parametrize("layout", LAYOUTS_OF_FOUR)
def test_four_ranks_over_nccl(fresh_torchrun: Any, layout: str) -> None:
    assert_equal(fresh_torchrun(four_ranks, ranks=4, layout=layout))


@needs_two
def test_a_failing_rank_ends_its_peers_over_nccl(fresh_torchrun: Any) -> None:
    """The peer's host or device waits for a message that never comes; it must not take NCCL's timeout to end."""
    began = time.monotonic()
    with pytest.raises(GroupFailureError) as caught:
        fresh_torchrun(failing_rank, ranks=2)
    assert "rank 0: instruction " in str(caught.value)
    assert "(forward of stage 3, micro-batch 0) failed: loss is not finite" in str(caught.value)
    assert time.monotonic() - began < 60
