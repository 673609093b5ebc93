"""Models in one process: the same weights for every layout, cuts, whole weights on disk, refusals."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from service.jobs.files import JobPaths
from service.jobs.spec.arithmetic import PrecisionSpec
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.model import ConvnetConfig, MlpConfig, TransformerConfig
from service.models import FamilyConfig, WeightsError, build, load_into
from service.models.reference import trained
from service.models.registry import outline
from service.parallel import checkpoint, mesh
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.pipeline.runtime import PipelineRuntime, Unobserved, Work
from service.parallel.pipeline.stage import Part
from service.parallel.tensor.placement import places_of
from service.schedules import generator
from service.schedules.schedule import Instruction

TRANSFORMER = TransformerConfig(vocab_size=16, dim=8, layers=3, heads=4, kv_heads=2, max_sequence=6)
MLP = MlpConfig(in_features=3, hidden=(4, 8, 4), out_features=2)
CONVNET = ConvnetConfig(height=4, width=4, channels=(2, 4), pool=2, hidden=(4,), out_features=2)
CONFIGS = [TRANSFORMER, MLP, CONVNET]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("spec", [ParallelSpec(tp=2), ParallelSpec(pp=3), ParallelSpec(pp=2, tp=2)])
def test_the_parts_of_every_layout_are_the_whole_of_one_process(config: FamilyConfig, spec: ParallelSpec) -> None:
    wanted = build(config, seed=4).state_dict()
    ranks = [mesh.plan(spec, rank) for rank in range(spec.world_size)]
    assert outline(config, ranks[-1].tp).parameters == {name: tuple(each.shape) for name, each in wanted.items()}
    parts = [(grid, build(config, grid, seed=4)) for grid in ranks]
    seen = set()
    for pp in range(spec.pp):
        shards = [part for grid, part in parts if grid.pp.rank == pp]
        for place in places_of(shards[0]):
            name, dimension = place.name, place.dimension
            tensors = [dict(part.named_parameters())[name].detach() for part in shards]
            joined = tensors[0] if dimension is None else torch.cat(tensors, dimension)
            assert torch.equal(joined, wanted[name]), name
            assert dimension is not None or all(torch.equal(each, tensors[0]) for each in tensors)
            assert name not in seen
            seen.add(name)
    assert seen == wanted.keys()


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS,
        TRANSFORMER.model_copy(update={"qkv_bias": True}),
        TRANSFORMER.model_copy(update={"tied_embeddings": True}),
    ],
)
def test_a_configuration_knows_the_names_of_its_parameters(config: FamilyConfig) -> None:
    assert sorted(config.parameter_names) == sorted(outline(config).parameters)


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_depend_on_the_seed_and_the_type_only_rounds_them(config: FamilyConfig) -> None:
    first, again, other = (build(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert len({float(first[name].flatten()[0]) for name in drawn}) == len(drawn)
    half = build(config, seed=1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(half[name], first[name].bfloat16()) for name in first)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_planned_model_takes_no_memory(config: FamilyConfig) -> None:
    planned = build(config, device="meta", dtype=torch.bfloat16)
    assert {parameter.device.type for parameter in planned.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in planned.parameters()} == {torch.bfloat16}
    assert planned.state_dict().keys() == build(config).state_dict().keys()


@given(st.integers(1, 12), st.integers(0, 20))
def test_stages_share_the_blocks_evenly(stages: int, extra: int) -> None:
    total = stages + extra
    parts = [Part(stage, stages).blocks(total) for stage in range(stages)]
    assert [index for part in parts for index in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 stages"):
        build(MLP, mesh.plan(ParallelSpec(pp=4)))


def test_one_process_runs_a_schedule_too() -> None:
    model, grid = build(MLP, dtype=torch.float64), mesh.build(ParallelSpec(), "cpu")
    x, targets = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6,))
    loss = torch.nn.functional.cross_entropy
    loss(model(x), targets).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    seen = []

    class Recorder(Unobserved):
        def computing(self, instruction: Instruction) -> AbstractContextManager[None]:
            seen.append(instruction)
            return nullcontext()

    runtime = PipelineRuntime({0: model}, grid, device=torch.device("cpu"), observer=Recorder())
    plan = generator("1f1b")(1, 1, 3)
    runtime.run(plan, Work(loss, x.chunk(3), targets.chunk(3)))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
    assert tuple(seen) == plan.ranks[0]


def test_a_pipeline_without_a_loss_is_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match=r"objective=None: a pipeline needs a function objective\(output, target\)"):
        Work(None)  # type: ignore[arg-type]


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 7 exceeds max_sequence=6"):
        build(TRANSFORMER)(torch.zeros(1, 7, dtype=torch.int64))


def test_a_stage_that_cannot_pass_on_parts_of_a_sequence_says_so() -> None:
    first = build(TRANSFORMER, mesh.plan(ParallelSpec(pp=2, tp=2)))
    with pytest.raises(ValueError, match="sends parts of a sequence: 5 does not divide by tp=2"):
        first(torch.zeros(1, 5, dtype=torch.int64))


def test_an_indivisible_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="out_features=4 does not divide by tp=3"):
        build(MLP, mesh.plan(ParallelSpec(tp=3)))


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trivet\.models has no 'rnn'; expected one of convnet, huggingface, mlp"):
        FAMILIES.function("rnn")


def test_low_precision_without_a_group_is_refused() -> None:
    alone = mesh.build(ParallelSpec(), "cpu")
    precision = Precision.from_spec(PrecisionSpec(param="bf16"))
    assert precision == Precision(torch.bfloat16, torch.float32)
    assert Precision.from_spec(PrecisionSpec()) == Precision()
    with pytest.raises(ValueError, match="needs a launched group"):
        apply_fsdp(build(MLP), alone, precision)
    model = build(MLP)
    assert apply_fsdp(model, alone) is model


def left_by_a_job(root: Path) -> JobPaths:
    """A job with checkpoints of steps 2 and 4 and a finished model of step 5; weights are drawn from the step."""
    paths = JobPaths(root / "job_x")
    for step in (2, 4):
        state = {f"model.{name}": tensor for name, tensor in build(MLP, seed=step).state_dict().items()}
        checkpoint.save(paths.checkpoints, step, state, {"model": MLP.model_dump(), "parallel": {}})
    paths.artifacts.mkdir(parents=True)
    save_file(build(MLP, seed=5).state_dict(), paths.artifacts / "model.safetensors")
    about = {"config": MLP.model_dump(), "step": 5, "parallel": {}}
    (paths.artifacts / "model.json").write_text(json.dumps(about))
    return paths


def test_whole_weights_of_every_step_are_found(tmp_path: Path) -> None:
    paths = left_by_a_job(tmp_path)
    for step, seed in (("latest", 5), (5, 5), (4, 4), (2, 2)):
        config, state = trained(paths, step)  # type: ignore[arg-type]
        assert config == MLP
        model = build(config)
        load_into(model, state)
        wanted = build(MLP, seed=seed).state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(WeightsError, match=r"job_x has no weights of step 3; there are \[2, 4, 5\]"):
        trained(paths, 3)
    (paths.artifacts / "model.json").unlink()
    assert torch.equal(trained(paths)[1]["head.bias"][slice(0, 2),], build(MLP, seed=4).state_dict()["head.bias"])


def test_a_job_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="job_y has no weights of step 'latest'; there are none"):
        trained(JobPaths(tmp_path / "job_y"))


def test_foreign_weights_change_nothing() -> None:
    model = build(MLP)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    foreign = {**build(MLP, seed=9).state_dict(), "head.bias": torch.zeros(7)}
    with pytest.raises(WeightsError, match=r"'head.bias' have shape \(7,\); this model has \(2,\)"):
        load_into(model, foreign)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
