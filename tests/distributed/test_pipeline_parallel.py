"""Pipelines, FSDP and their combinations on real ranks against one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_layouts import CONFIGS, TOLERANCE, VIRTUAL_STAGES, batch, full, reference, run_layout
from torch import Tensor

from service.jobs.spec.common import ParallelSpec
from service.models import WeightsError, build, load_into
from service.parallel import distributed, mesh
from service.parallel.collectives import DisagreementError
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.pipeline.runtime import PipelineRuntime, Work
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.schedules import GENERATORS, generator

pytestmark = pytest.mark.distributed
MANY = 20
"""More micro-batches than a rank may have buffers: two for each stage of the pipeline, of which there are up to 8."""


def four_ranks() -> dict[str, Any]:
    distributed.start("cpu")
    found = {
        **{f"pp4 {name}": run_layout("deep", ParallelSpec(pp=4), name, MANY) for name in GENERATORS},
        "pp4 zero_bubble mlp": run_layout("mlp", ParallelSpec(pp=4), "zero_bubble", 3),
        "pp4 gpipe mlp": run_layout("mlp", ParallelSpec(pp=4), "gpipe", 3),
        "pp4 1f1b fewer micro-batches": run_layout("mlp", ParallelSpec(pp=4), "1f1b", 2),
        "pp2 tp2": run_layout("transformer", ParallelSpec(pp=2, tp=2), "1f1b", 4),
        "pp2 tp2 mlp": run_layout("mlp", ParallelSpec(pp=2, tp=2), "gpipe", 4),
        "tp2 fsdp2": run_layout("transformer", ParallelSpec(dp_shard=2, tp=2), "1f1b", 2, shard=True),
        "pp2 fsdp2": run_layout("transformer", ParallelSpec(pp=2, dp_shard=2), "1f1b", 4, shard=True, reshard=False),
        "pp2 fsdp2 zero_bubble": run_layout(
            "transformer", ParallelSpec(pp=2, dp_shard=2), "zero_bubble", 4, shard=True, reshard=False, recompute=True
        ),
        "pp2 fsdp2 zbv": run_layout("transformer", ParallelSpec(pp=2, dp_shard=2), "zbv", 4, shard=True, reshard=False),
        "pp2 fsdp2 zbv resharded": run_layout("mlp", ParallelSpec(pp=2, dp_shard=2), "zbv", 1, shard=True),
        "pp2 fsdp2 interleaved": run_layout(
            "transformer", ParallelSpec(pp=2, dp_shard=2), "interleaved", 5, shard=True, reshard=False
        ),
        "pp2 replicate2 zero_bubble": run_layout(
            "mlp", ParallelSpec(pp=2, dp_replicate=2), "zero_bubble", 3, shard=True, reshard=False
        ),
        "pp2 tp2 zbv": run_layout("transformer", ParallelSpec(pp=2, tp=2), "zbv", 4, recompute=True),
        "hsdp": run_layout("mlp", ParallelSpec(dp_replicate=2, dp_shard=2), "gpipe", 2, shard=True),
        "replicate2 tp2": run_layout("mlp", ParallelSpec(dp_replicate=2, tp=2), "gpipe", 1, shard=True),
    }
    distributed.stop()
    return found


@pytest.mark.slow
def test_every_layout_has_the_gradients_of_one_process(torchrun: Any) -> None:
    for rank, layouts in enumerate(torchrun(four_ranks, ranks=4)):
        for name, layout in layouts.items():
            assert layout["worst"] < TOLERANCE, (rank, name, layout["found"])
            # Evaluation may add a buffer of its own shape; neither count grows with the micro-batches.
            assert layout["buffers"] <= layout["bound"] + 2, (rank, name, layout)
        for name in GENERATORS:
            buffers = layouts[f"pp4 {name}"]["buffers"]
            stages = 4 * VIRTUAL_STAGES.get(name, 1)
            print(f"rank {rank}, {name}: {buffers} receive buffers for {MANY} micro-batches over {stages} stages")
            # GPipe keeps all inputs until their backwards: its buffers are its activations.
            assert buffers <= (2 * stages if name != "gpipe" else MANY + 2), (rank, name)


def every_schedule() -> dict[str, Any]:
    """Each schedule on two ranks, with an odd number of micro-batches; stages hand over within a rank at a V's turn."""
    return {
        f"{name} {family}": run_layout(family, ParallelSpec(pp=2), name, 5, recompute=family == "transformer")
        for name in GENERATORS
        for family in ("transformer", "mlp")
    }


def shapes_and_errors() -> dict[str, str]:
    """Shapes change with the key; without a new key all ranks refuse before anything is posted."""
    config = CONFIGS["mlp"]
    grid = mesh.build(ParallelSpec(pp=2), "cpu")
    stage = build(config, grid, dtype=torch.float64, seed=7)
    runtime = PipelineRuntime({grid.pp.rank: stage}, grid, device=torch.device("cpu"))

    def work(rows: int, key: str) -> Work:
        x, targets = batch(config, 2 * rows)
        return Work(vocabulary_parallel_cross_entropy, x.chunk(2), targets.chunk(2), key=key)

    plan, found = generator("1f1b")(2, 1, 2), {}
    for rows in (3, 5, 3):
        runtime.run(plan, work(rows, f"rows={rows}"))
    try:
        runtime.run(plan, work(4, "rows=3"))
    except (ValueError, DisagreementError) as error:
        found["shape"] = str(error)
    for name, wrong in {
        "inputs": Work(vocabulary_parallel_cross_entropy),
        "weights": Work(work(3, "").objective, work(3, "").inputs, work(3, "").targets, [1.0]),
    }.items():
        try:
            runtime.run(plan, wrong)
        except ValueError as error:
            found[name] = str(error)
    try:
        runtime.run(generator("1f1b")(3, 1, 2), work(3, ""))
    except ValueError as error:
        found["owners"] = str(error)
    try:
        load_into(stage, {})
    except WeightsError as error:
        found["weights_error"] = str(error)
    try:
        load_into(stage, {name: torch.zeros(1) for name, _ in stage.named_parameters()})
    except WeightsError as error:
        found["shape_error"] = str(error)
    return found


def mixed_precision() -> dict[str, Any]:
    """bf16 computations over float32 parameters, whose gradients stay close to float32's.

    Weight gradients that are left for later are added up in the type of the reduction, like any others.
    """
    config, found = CONFIGS["transformer"], {}
    _, gradients, _ = reference(config, 8)
    wanted = torch.cat([each.flatten() for each in gradients.values()])
    grid = mesh.build(ParallelSpec(dp_shard=2), "cpu")
    x, targets = (each.chunk(2)[grid.dp.rank] for each in batch(config, 8))
    for name in ("1f1b", "zero_bubble"):
        model = build(config, grid, seed=7)
        apply_fsdp(model, grid, Precision(torch.bfloat16, torch.float32), reshard=False)
        runtime = PipelineRuntime({0: model}, grid, device=torch.device("cpu"))
        work = Work(vocabulary_parallel_cross_entropy, x.chunk(4), targets.chunk(4), [1 / 8] * 4)
        runtime.run(generator(name)(1, 1, 4), work)
        got = torch.cat([full(parameter.grad).flatten() for parameter in model.parameters()]).double()
        found[name] = {
            "gradients": sorted({str(parameter.grad.dtype) for parameter in model.parameters()}),
            "relative": float((got - wanted).norm() / wanted.norm()),
            "logits": str(model(x).dtype),
        }
    return found


def two_ranks() -> dict[str, Any]:
    distributed.start("cpu")
    found = {"schedules": every_schedule(), "refused": shapes_and_errors(), "mixed": mixed_precision()}
    try:
        mesh.build(ParallelSpec(tp=4), "cpu")
    except mesh.MeshError as error:
        found["mesh"] = str(error)
    distributed.stop()
    return found


def test_virtual_stages_changing_shapes_and_refusals(torchrun: Any) -> None:
    first, second = torchrun(two_ranks, ranks=2)
    for rank, found in enumerate((first, second)):
        for name, layout in found["schedules"].items():
            assert layout["worst"] < TOLERANCE, (rank, name, layout["found"])
            assert (layout["deferred"] > 0) == name.startswith("z"), (rank, name)
        assert found["mesh"].endswith("tp=4 = 4 ranks were asked for, but 2 were started")
        refused = found["refused"]
        assert refused["inputs"] == f"0 {['inputs', 'targets'][rank]} for 2 micro-batches"
        assert refused["weights"] == "1 weights for 2 micro-batches"
        assert refused["owners"] == "the schedule gives stages to ranks (0, 1, 2); this pipeline has (0, 1)"
        assert "they belong to another model" in refused["weights_error"]
        assert "have shape (1,); this model has" in refused["shape_error"]
        for name, mixed in found["mixed"].items():
            assert (mixed["logits"], mixed["gradients"]) == ("torch.bfloat16", ["torch.float32"])
            assert mixed["relative"] < 0.02, name
        assert found["mixed"]["zero_bubble"]["relative"] == pytest.approx(found["mixed"]["1f1b"]["relative"], rel=0.05)
    assert "first_loss" in first["schedules"]["zbv mlp"]["found"]
    assert "first_loss" in second["schedules"]["interleaved mlp"]["found"]
    shape = "inputs[0] is float64[4, 6], and others under the key 'rows=3' are float64[3, 6]"
    assert first["refused"]["shape"].startswith(shape)
    assert second["refused"]["shape"].startswith(shape)


def failing_rank() -> None:
    distributed.start("cpu")
    config = CONFIGS["mlp"]
    grid = mesh.build(ParallelSpec(pp=2), "cpu")
    runtime = PipelineRuntime({grid.pp.rank: build(config, grid)}, grid, device=torch.device("cpu"))

    def objective(output: Tensor, target: Tensor) -> Tensor:
        raise FloatingPointError("loss is not finite")

    x, targets = batch(config, 4)
    runtime.run(generator("1f1b")(2, 1, 2), Work(objective, x.float().chunk(2), targets.chunk(2)))


@pytest.mark.slow
def test_a_failing_rank_names_itself_and_ends_the_group(torchrun: Any) -> None:
    with pytest.raises(AssertionError, match="the group ended with exit status 1") as caught:
        torchrun(failing_rank, ranks=2)
    message = "rank 1: instruction 1 of 8 (forward of stage 1, micro-batch 0) failed: loss is not finite"
    assert message in str(caught.value)
