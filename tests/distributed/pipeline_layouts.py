"""A pipeline of any schedule, on any mesh and device, against one process: for the tests of gloo and of NCCL."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import FamilyConfig, build, full_weights, load_into
from service.parallel import mesh
from service.parallel.fsdp import apply_fsdp
from service.parallel.pipeline.runtime import PipelineRuntime, Work
from service.parallel.pipeline.stage import Part
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.schedules import forward_only, generator
from service.schedules.schedule import Schedule
from service.schedules.verify import verify

TOLERANCE = 1e-10
CPU = torch.device("cpu")
VIRTUAL_STAGES = {"interleaved": 2, "zbv": 2}
CONFIGS: dict[str, FamilyConfig] = {
    "transformer": TransformerConfig(vocab_size=32, dim=16, layers=4, heads=4, kv_heads=2, ffn_dim=24, max_sequence=8),
    "deep": TransformerConfig(vocab_size=16, dim=8, layers=8, heads=2, ffn_dim=8, max_sequence=8),
    "mlp": MlpConfig(in_features=6, hidden=(8, 12, 4, 8), out_features=4, activation="tanh"),
}


def batch(config: FamilyConfig, size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    if isinstance(config, TransformerConfig):
        tokens, targets = torch.randint(0, config.vocab_size, (2, size, 8))
        return tokens.to(device), targets.to(device)
    x, classes = torch.randn(size, config.in_features).double(), torch.randint(0, config.out_features, (size,))
    return x.to(device), classes.to(device)


def reference(
    config: FamilyConfig, size: int, device: str = "cpu"
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and weights of one process over the whole batch."""
    model = build(config, dtype=torch.float64, device=device, seed=7)
    x, targets = batch(config, size, device)
    loss = vocabulary_parallel_cross_entropy(model(x), targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(loss), gradients, model.state_dict()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(found: nn.Module, wanted: dict[str, Tensor], *, gradients: bool) -> float:
    return max(
        float((full(parameter.grad if gradients else parameter.detach()) - wanted[name]).abs().max())
        for name, parameter in found.named_parameters()
    )


def build_stages(config: FamilyConfig, grid: mesh.Mesh, plan: Schedule, device: torch.device) -> dict[int, Any]:
    """This rank's stages of the schedule, by stage number."""
    own = [stage for stage, owner in enumerate(plan.owners) if owner == grid.pp.rank]
    return {
        stage: build(config, grid, dtype=torch.float64, device=device, seed=7, part=Part(stage, plan.stages))
        for stage in own
    }


def run_layout(
    family: str,
    spec: ParallelSpec,
    schedule: str,
    micro_batches: int,
    *,
    shard: bool = False,
    reshard: bool = True,
    recompute: bool = False,
    device: torch.device = CPU,
    grid: mesh.Mesh | None = None,
) -> dict[str, Any]:
    """Two steps' worth of gradients, an evaluation between them, the whole weights there and back.

    ``grid`` is the mesh of ``spec``, built here when absent.
    """
    config, per_micro = CONFIGS[family], 2
    size = per_micro * micro_batches * spec.dp
    loss, gradients, weights = reference(config, size, device.type)
    grid = grid or mesh.build(spec, device.type)
    plan = generator(schedule)(spec.pp, VIRTUAL_STAGES.get(schedule, 1), micro_batches)
    stages = build_stages(config, grid, plan, device)
    for stage in stages.values():
        if recompute:
            recompute_blocks(stage)
        if shard:
            apply_fsdp(stage, grid, reshard=reshard)
    runtime = PipelineRuntime(stages, grid, device=device, owners=plan.owners)
    x, targets = (each.chunk(spec.dp)[grid.dp.rank] for each in batch(config, size, device.type))
    axis = next(iter(stages.values())).output_axis
    work = Work(
        lambda output, target: vocabulary_parallel_cross_entropy(output, target, axis),
        x.chunk(micro_batches),
        targets.chunk(micro_batches),
        [1 / (micro_batches * spec.dp)] * micro_batches,
    )
    found, deferred = _compare_steps(runtime, stages, plan, work, gradients, loss=loss if spec.dp == 1 else None)
    found |= _compare_weights(config, grid, stages, weights, device)
    return {
        "worst": max(found.values()),
        "found": found,
        "deferred": deferred,
        "buffers": runtime.transport.pool.allocated,
        "bound": verify(plan).peak_buffers[grid.pp.rank],
    }


def _compare_steps(
    runtime: PipelineRuntime,
    stages: dict[int, Any],
    plan: Schedule,
    work: Work,
    gradients: dict[str, Tensor],
    *,
    loss: float | None,
) -> tuple[dict[str, float], int]:
    """Distances of two steps and two evaluations, of losses too where one is given; backwards that were split."""
    found: dict[str, float] = {}
    deferred = 0
    for step in ("first", "second"):
        values = runtime.run(plan, work)
        deferred = runtime.split_backwards
        found[f"{step}_gradients"] = max(distance(stage, gradients, gradients=True) for stage in stages.values())
        for stage in stages.values():
            stage.zero_grad()
        evaluated = runtime.run(forward_only(plan.owners, plan.micro_batches), work)
        for name, each in (("loss", values), ("evaluated", evaluated)):
            if each and loss is not None:
                found[f"{step}_{name}"] = abs(float(torch.stack(each).mean()) - loss)
    return found, deferred


def _compare_weights(
    config: FamilyConfig, grid: mesh.Mesh, stages: dict[int, Any], weights: dict[str, Tensor], device: torch.device
) -> dict[str, float]:
    """Distances of the whole weights, gathered on the first rank, and of others after they were loaded."""
    found: dict[str, float] = {}
    gathered = full_weights.gather(stages.values(), grid)
    if grid.rank == 0:
        assert gathered.keys() == weights.keys()
        found["gathered"] = max(float((gathered[name] - weights[name].cpu()).abs().max()) for name in weights)
    other = build(config, dtype=torch.float64, device=device, seed=8).state_dict()
    for stage in stages.values():
        load_into(stage, other)
    return found | {"loaded": max(distance(stage, other, gradients=False) for stage in stages.values())}


def recompute_blocks(stage: Any) -> None:
    for block in stage.blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
