"""The ladder on a real group: verdicts are the ranks' together, and the gate names the mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ladder_runs import quick_plan

pytestmark = pytest.mark.distributed


def climb_job(parallel: dict[str, int], model: dict[str, Any], folder: str) -> Any:
    from service.parallel import distributed

    result = climb_in_group(parallel, model, folder)
    distributed.stop()
    return result


def climb_in_group(parallel: dict[str, int], model: dict[str, Any], folder: str, **changes: Any) -> Any:
    import torch.distributed as dist

    from service.compilation import job
    from service.compilation.selftest import Proof
    from service.jobs.files import DataLayout
    from service.jobs.runtime import NullReporter, RunContext
    from service.jobs.spec.compile import CompileSpec
    from service.parallel import distributed

    job.plan_run = quick_plan
    job.self_test = lambda: (Proof("none", "nothing", False, ""),)  # type: ignore[assignment]  # it takes its time
    distributed.start("cpu")
    spec = CompileSpec.model_validate(
        {
            "model": model,
            "parallel": parallel,
            "modes": ["eager", "aot_eager"],
            "phases": ["train"],
            "shapes": [4],
            "steps": 3,
            **changes,
        }
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = DataLayout(Path(folder))
    return job.run(spec, RunContext("job_" + "0" * 20, 1, rank, rank, world, "cpu", layout, NullReporter(), bool))


def artifacts_of(folder: Path) -> Path:
    return folder / "jobs" / ("job_" + "0" * 20) / "artifacts"


def climb_all(models: list[dict[str, Any]], folder: str) -> Any:
    """The whole ladder under FSDP2, for each model in turn: on every rank, what the rungs' losses came to."""
    from service.compilation import phase_observer
    from service.parallel import distributed

    kept: list[Any] = []
    original = phase_observer.observe_rung
    phase_observer.observe_rung = lambda *given: kept.append(original(*given)) or kept[-1]  # type: ignore[func-returns-value]
    changes = {"modes": ["eager", "aot_eager", "aot_eager_decomp_partition", "inductor", "reduce-overhead"]}
    results = []
    for index, model in enumerate(models):
        result = climb_in_group({"dp_shard": 2}, model, f"{folder}/{index}", **changes)
        losses = [[each.max_abs for each in seen.comparisons if each.kind == "loss"] for seen in kept]
        results.append((result, losses))
        kept.clear()
    distributed.stop()
    return results


def verdict_of_one_failing_rank() -> Any:
    from functools import partial

    import torch
    import torch.distributed as dist
    from torch import nn

    from service.compilation import phase_observer
    from service.compilation.ladder import climb
    from service.compilation.program.model import ModelProgram, SampleBatch
    from service.compilation.ranks.group import WaitLimits, collective_attempt, slowest
    from service.compilation.rungs import LADDER, Rung
    from service.parallel import distributed

    limits = WaitLimits(failed_s=3.0)
    phase_observer.collective_attempt = partial(collective_attempt, limits=limits)  # type: ignore[assignment]

    def crashes(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("planted on rank 1")

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    distributed.start("cpu")
    program = ModelProgram(lambda dtype: Linear().to(dtype), (SampleBatch((torch.ones(3, 4),), torch.zeros(3).long()),))
    rung = Rung("planted", crashes if dist.get_rank() else "aot_eager", compiles_backward=False)
    torch.manual_seed(0)
    plan = quick_plan(program, 3, agree=slowest)
    results = list(climb(program, [rung, LADDER[1]], ["inference"], plan))
    distributed.stop()
    return [[result.verdict, [finding.message for finding in result.findings]] for result in results]


TOKENS = {"source": "tokens", "sequence": 8}
MLP = {"family": "mlp", "in_features": 8, "hidden": [8, 8], "out_features": 4}


def test_the_ladder_is_climbed_by_a_tensor_parallel_model(torchrun: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = torchrun(climb_job, 2, parallel={"tp": 2}, model=MLP, folder=str(tmp_path))
    assert second is None
    report = json.loads((tmp_path / "jobs" / ("job_" + "0" * 20) / "artifacts" / "report.json").read_text())
    assert first["verdicts"] == {"pass": 2}, report["rungs"]
    assert first["gate"]["train"] == "aot_eager"
    assert first["gate"]["fingerprint"]["parallel.tp"] == 2
    trained = next(row for row in report["rungs"] if row["rung"] == "aot_eager" and row["phase"] == "train")
    assert min(trained["parameters"]["compiled_backwards"]) > 0
    assert trained["parameters"]["moved"] == trained["parameters"]["trainable"]


@pytest.mark.slow
def test_a_failure_on_one_rank_fails_the_rung_on_all(torchrun: Callable[..., list[Any]]) -> None:
    first, second = torchrun(verdict_of_one_failing_rank, 2)
    assert first == second
    assert first[0][0] == "fail_error"
    assert first[0][1][0].startswith("rank 1: BackendCompilerFailed")
    assert first[1][0] == "not_reached"


ARITHMETIC: dict[str, Any] = {"precision": {"param": "bf16"}, "activation_checkpoint": "selective"}
TRANSFORMER = {
    "family": "transformer",
    "vocab_size": 256,
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "ffn_dim": 32,
    "max_sequence": 8,
}


@pytest.mark.slow(25)
def test_compiled_losses_are_eagers_at_every_rung_under_fsdp(
    torchrun: Callable[..., list[Any]], tmp_path: Path
) -> None:
    wide = {**MLP, "hidden": [8]}
    first, second = torchrun(climb_all, 2, models=[wide, TRANSFORMER], folder=str(tmp_path))
    for rank in (first, second):
        for _, losses in rank:
            exact, last = losses[:3], losses[3]  # below generated code nothing is computed in another way
            assert exact == [[0.0]] * 3
            assert max(last) < 1e-6
    for index, (result, _) in enumerate(first):
        report = json.loads(
            (tmp_path / str(index) / "jobs" / ("job_" + "0" * 20) / "artifacts/report.json").read_text()
        )
        assert result["verdicts"] == {"pass": 4, "not_applicable": 1}, report["rungs"]
        assert result["gate"]["train"] == "inductor"
        assert result["gate"]["fingerprint"]["parallel.dp_shard"] == 2
        assert min(report["rungs"][1]["parameters"]["compiled_backwards"]) > 0
        for row in report["rungs"][:4]:
            assert row["graphs"] >= 1
            assert row["hooks_traced"] == 0
            assert row["parameters"]["moved"] == row["parameters"]["trainable"]
            assert row["parameters"]["unsharded"] == []
    assert (artifacts_of(tmp_path / "0") / "compile_cache" / "train-inductor-1.bin").exists()


def climb_padded(folder: str) -> Any:
    from service.parallel import distributed

    changes = {"data": TOKENS, "shapes": [8], "phases": ["inference", "train"]}
    result = climb_in_group({"tp": 2}, {**TRANSFORMER, "vocab_size": 257, "layers": 1}, folder, **changes)
    distributed.stop()
    return result


@pytest.mark.slow(8)
def test_a_vocabulary_that_does_not_divide_is_checked(torchrun: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Its ranks have logits of different numbers of tokens. What is generated for ranks is tried under FSDP."""
    first, _ = torchrun(climb_padded, 2, folder=str(tmp_path))
    report = json.loads((artifacts_of(tmp_path) / "report.json").read_text())
    assert first["verdicts"] == {"pass": 4}, report["rungs"]
    assert first["gate"]["train"] == first["gate"]["inference"] == "aot_eager"


def climb_and_train(folder: str) -> Any:
    """The check's result, the graphs that a training job then compiles by its gate, its losses and an eager job's, and
    how a job that accumulates is refused.
    """
    import torch
    from torch._dynamo.utils import counters
    from training_runs import train

    from service.parallel import distributed

    sharded, samples = {"dp_shard": 2}, 4
    checked = climb_in_group(sharded, TRANSFORMER, folder, data=TOKENS, shapes=[8], **ARITHMETIC)
    job = {"model": TRANSFORMER, "data": TOKENS, "steps": 2, "batch": {"global": 16}, **ARITHMETIC}
    eager = train(folder, {**job, "parallel": sharded}, test_samples=samples, job_id="job_" + "1" * 20)["loss"]
    torch._dynamo.reset()
    counters.clear()
    choice = {"train": True, "gate": "job_" + "0" * 20}
    own = train(
        folder, {**job, "parallel": sharded, "compile": choice}, test_samples=samples, job_id="job_" + "2" * 20
    )["loss"]
    graphs = counters["stats"]["unique_graphs"]
    accumulates = {**job, "batch": {"global": 16, "micro": 4}, "parallel": sharded, "compile": choice}
    try:
        train(folder, accumulates, job_id="job_" + "3" * 20)
    except RuntimeError as error:
        refusal = str(error)
    distributed.stop()
    return checked, graphs, eager, own, refusal


@pytest.mark.slow
def test_a_training_job_of_the_same_arithmetic_is_compiled(torchrun: Callable[..., list[Any]], tmp_path: Path) -> None:
    (checked, graphs, eager, own, refusal), _ = torchrun(climb_and_train, 2, folder=str(tmp_path))
    assert checked["gate"]["train"] == "aot_eager", checked
    assert checked["gate"]["fingerprint"]["precision.param"] == "bf16"
    assert checked["gate"]["fingerprint"]["activation_checkpoint"] == "selective"
    assert graphs > 0
    assert own == pytest.approx(eager, rel=2e-2)  # bf16 rounds to 2^-8
    assert refusal.endswith("configuration: sharding.reshard is 'never' here and 'always' in the report")


def kept_between_forwards(folder: str) -> Any:
    """By micro-batches of a step, the blocks' parameters that the checked model keeps gathered after a forward."""
    import torch
    from torch.distributed.tensor import DTensor

    from service.compilation.program.target import target_of
    from service.jobs.files import DataLayout
    from service.jobs.runtime import NullReporter, RunContext
    from service.jobs.spec.compile import CompileSpec
    from service.parallel import distributed

    device = distributed.start("cpu")
    kept = {}
    for micro_batches in (1, 2):
        given = {"model": TRANSFORMER, "parallel": {"dp_shard": 2}, "shapes": [2], "micro_batches": micro_batches}
        rank = torch.distributed.get_rank()
        context = RunContext("job_" + "0" * 20, 1, rank, rank, 2, "cpu", DataLayout(Path(folder)), NullReporter(), bool)
        program = target_of(CompileSpec.model_validate(given), context, device).program
        model = program.build(torch.float32).modules["model"]
        with torch.no_grad():
            model(torch.zeros(2, 8, dtype=torch.long))
        blocks: Any = model.blocks
        kept[micro_batches] = sum(not isinstance(value, DTensor) for value in blocks.parameters())
    distributed.stop()
    return kept


@pytest.mark.slow
def test_the_subject_is_sharded_as_a_training_job_of_its_pattern(
    torchrun: Callable[..., list[Any]], tmp_path: Path
) -> None:
    kept, _ = torchrun(kept_between_forwards, 2, folder=str(tmp_path))
    assert kept["1"] == 0
    assert kept["2"] > 0


def climb_stages_and_train(folder: str) -> Any:
    """The check of two pipeline stages; the losses of training jobs over them, eager and compiled by its gate."""
    from training_runs import train

    from service.parallel import distributed

    stages = {"pp": 2}
    deep = {**MLP, "hidden": [8, 8], "in_features": 64, "out_features": 10}
    checked = climb_in_group(stages, deep, folder, phases=["train", "inference"], shapes=[4, 3])
    job = {"model": deep, "data": {"source": "digits"}, "steps": 2, "batch": {"global": 16}, "parallel": stages}
    eager = train(folder, job, test_samples=8, job_id="job_" + "1" * 20)["loss"]
    choice = {"train": True, "inference": True, "gate": "job_" + "0" * 20}
    own = train(folder, {**job, "compile": choice}, test_samples=8, job_id="job_" + "2" * 20)["loss"]
    other = {**job, "compile": choice, "pipeline": {"schedule": "gpipe"}}
    try:
        train(folder, other, job_id="job_" + "3" * 20)
    except RuntimeError as error:
        refusal = str(error)
    distributed.stop()
    return checked, eager, own, refusal


@pytest.mark.slow
def test_stages_of_a_pipeline_are_checked_and_compiled_by_their_gate(
    torchrun: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (checked, eager, own, refusal), _ = torchrun(climb_stages_and_train, 2, folder=str(tmp_path))
    report = json.loads((artifacts_of(tmp_path) / "report.json").read_text())
    assert checked["verdicts"] == {"pass": 4}, report["rungs"]
    assert checked["gate"]["fingerprint"]["parallel.pp"] == 2
    assert checked["gate"]["micro_batches"] == 4
    trained = next(row for row in report["rungs"] if row["rung"] == "aot_eager" and row["phase"] == "train")
    assert [call["module"] for call in trained["invocations"]] == ["stage0"] * 2
    assert min(trained["parameters"]["compiled_backwards"]) == 4
    assert trained["parameters"]["moved"] == trained["parameters"]["trainable"] > 0
    assert own == pytest.approx(eager, rel=1e-6)
    assert "pipeline.schedule is 'gpipe' here and '1f1b' in the report" in refusal


def climb_with_a_failing_stage(folder: str) -> Any:
    """The verdicts over two stages, of which the last alone has a compiler that crashes."""
    import torch.distributed as dist

    from service.compilation import rungs
    from service.parallel import distributed

    def crashes(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("planted")

    distributed.start("cpu")
    if dist.get_rank() == 1:
        broken = {"aot_eager": rungs.Rung("aot_eager", crashes)}
        rungs.LADDER = tuple(broken.get(rung.name, rung) for rung in rungs.LADDER)
    result = climb_in_group({"pp": 2}, {**MLP, "hidden": [8, 8, 8]}, folder)
    distributed.stop()
    return result


@pytest.mark.slow
def test_a_stage_that_does_not_compile_fails_its_rung_and_leaves_nobody_waiting(
    torchrun: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, _ = torchrun(climb_with_a_failing_stage, 2, folder=str(tmp_path))
    assert first["verdicts"] == {"pass": 1, "fail_error": 1}
    report = json.loads((artifacts_of(tmp_path) / "report.json").read_text())
    message = report["rungs"][1]["findings"][0]["message"]
    assert message.startswith("rank 1: RuntimeError: stage1: ")
    assert "planted" in message
    assert report["diagnoses"] == []


def diagnose_on_a_mesh(folder: str) -> Any:
    """What every rank makes of a compiler that adds one where a block has ``torch.relu``, under FSDP2."""
    import torch
    from programs.deep import WRONG, Deep

    from service.compilation.diagnosis import diagnose
    from service.compilation.ladder import climb
    from service.compilation.program.model import ModelProgram, SampleBatch
    from service.compilation.ranks.group import slowest
    from service.compilation.rungs import Rung
    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel import mesh as meshes
    from service.parallel.fsdp import Precision, apply_fsdp

    distributed.start("cpu")
    mesh = meshes.build(ParallelSpec(dp_shard=2), "cpu")

    def build(dtype: torch.dtype) -> torch.nn.Module:
        torch.manual_seed(3)
        return apply_fsdp(Deep().to(dtype), mesh, Precision())

    program = ModelProgram(build, (SampleBatch((torch.ones(4, 6),), torch.zeros(4).long()),))
    plan = quick_plan(program, 3, agree=slowest)
    (result,) = climb(program, [Rung("planted", WRONG, compiles_backward=False)], ["inference"], plan)
    found = diagnose(program, result, plan, Path(folder))
    distributed.stop()
    assert found is not None, result
    return [result.verdict, found.module, found.reproduction.script, found.reproduction.said]


@pytest.mark.slow
def test_ranks_look_for_a_fault_together_and_the_first_writes(
    torchrun: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = torchrun(diagnose_on_a_mesh, 2, folder=str(tmp_path))
    assert first[:2] == second[:2] == ["fail_parity", "model.blocks.1"]
    assert first[2] == "diagnosis/inference-planted/reproduction.py"
    assert first[3].startswith("result 0 is off by"), first
    assert not second[2]
    assert len(list((tmp_path / "diagnosis" / "inference-planted" / "trace").iterdir())) == 2
