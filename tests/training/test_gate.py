"""The gate opens only for the very configuration and phase that a compile job passed."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.files import DataLayout
from service.jobs.spec.arithmetic import CompileChoice, PrecisionSpec
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import MlpConfig, ModelConfig, TransformerConfig
from service.jobs.spec.train import PipelineSpec, TrainSpec
from service.models.parallelize import ModelRecipe, fingerprint, gate_fingerprints
from service.models.registry import outline
from service.training.gate import (
    GateError,
    allowed_modes,
    difference,
    lowest_mode,
    portable_caches,
)

GATE = "job_" + "g" * 20
MLP, TRANSFORMER = MlpConfig(in_features=64, hidden=(8, 8), out_features=10), TransformerConfig(layers=2)
CPU = torch.device("cpu")
OWN = fingerprint(MLP, ModelRecipe(), CPU)
SHARDING = ["sharding.reduce", "sharding.reshard"]
PASSED = {"train": "inductor", "inference": "aot_eager", "fingerprint": OWN}


def publish(data: DataLayout, report: Any) -> None:
    folder = data.job(GATE).artifacts
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(report if isinstance(report, str) else json.dumps(report))


@pytest.mark.parametrize(
    ("train", "inference", "expected"),
    [
        (False, False, {}),
        (True, False, {"train": "inductor"}),
        (False, True, {"inference": "aot_eager"}),
        (True, True, {"train": "inductor", "inference": "aot_eager"}),
    ],
)
def test_only_what_is_asked_for_is_opened(
    data: DataLayout, train: bool, inference: bool, expected: dict[str, str]
) -> None:
    publish(data, {"gate": PASSED})
    assert allowed_modes(CompileChoice(train=train, inference=inference, gate=GATE), [OWN], data) == expected


@pytest.mark.parametrize("phase", ["train", "inference"])
@given(st.data())
def test_every_field_of_the_configuration_is_refused_by_its_name(phase: str, draw: st.DataObject) -> None:
    parallel = ParallelSpec(pp=2, dp_shard=2)
    recipe = ModelRecipe(parallel, PrecisionSpec(param="bf16"), activation_checkpoint="full", pipeline=PipelineSpec())
    own = fingerprint(MLP, recipe, CPU)
    prefixes = {name.split(".")[0] for name in own}
    assert prefixes >= {"model", "parallel", "precision", "sharding", "pipeline", "activation_checkpoint", "torch"}
    assert prefixes >= {"device", "architecture"}
    field = draw.draw(st.sampled_from(sorted(own)))
    with tempfile.TemporaryDirectory() as folder:
        data = DataLayout(Path(folder))
        publish(data, {"gate": {**PASSED, "fingerprint": {**own, field: "another"}}})
        with pytest.raises(GateError, match=f"another configuration: {re.escape(field)} is .* here and 'another' in"):
            allowed_modes(CompileChoice.model_validate({phase: True, "gate": GATE}), [own], data)


def test_another_configuration_is_refused_by_field(data: DataLayout) -> None:
    publish(data, {"gate": {**PASSED, "fingerprint": {**OWN, "parallel.tp": 2, "torch": "2.0"}}})
    with pytest.raises(GateError, match=r"parallel.tp is 1 here and 2 in the report; torch is '.*' here and '2.0'"):
        allowed_modes(CompileChoice(train=True, gate=GATE), [OWN], data)


@pytest.mark.parametrize(
    ("checked", "own", "field"),
    [
        ({}, {}, None),
        ({}, {"batch": {"global": 32, "micro": 4}}, "sharding.reshard is 'never' here and 'always' in the report"),
        ({"micro_batches": 2}, {"batch": {"global": 32, "micro": 4}}, None),
        ({"sharding": {"reshard": "never"}}, {"batch": {"global": 32, "micro": 4}}, None),
        (
            {"micro_batches": 2},
            {"batch": {"global": 32, "micro": 4}, "sharding": {"reduce": "every"}},
            "sharding.reduce is 'every' here and 'last' in the report",
        ),
        ({}, {"sharding": {"reduce": "every"}}, None),  # there is one micro-batch only
    ],
)
def test_what_fsdp_keeps_between_micro_batches_is_part_of_the_configuration(
    data: DataLayout, checked: dict[str, Any], own: dict[str, Any], field: str | None
) -> None:
    common = {"model": MLP.model_dump(), "parallel": {"dp_shard": 2}}
    check = CompileSpec.model_validate({**common, **checked})
    job = TrainSpec.model_validate({**common, "data": {"source": "digits"}, "steps": 1, **own})
    of_check = fingerprint(MLP, ModelRecipe.from_spec(check), CPU)
    publish(data, {"gate": {**PASSED, "fingerprint": of_check}})
    choice, mine = (
        CompileChoice(train=True, gate=GATE),
        gate_fingerprints(outline(MLP), ModelRecipe.from_spec(job), job.objective, CPU),
    )
    if field is None:
        assert allowed_modes(choice, mine, data, job.micro_batches) == {"train": "inductor"}
    else:
        with pytest.raises(GateError, match=f"another configuration: {field}$"):
            allowed_modes(choice, mine, data, job.micro_batches)


@pytest.mark.parametrize("checked", [{}, {"shapes": [[8, 64], [16, 32]]}])
def test_inputs_of_another_shape_are_refused(data: DataLayout, checked: dict[str, Any]) -> None:
    """Such as shorter sequences, and a report of an older version, which names none."""
    publish(data, {"gate": {**PASSED, **checked}})
    with pytest.raises(GateError, match=r"inputs of .*, and here they are \[16, 64\]; check with .* shapes of \[16\]"):
        allowed_modes(CompileChoice(train=True, gate=GATE), [OWN], data, shape=(16, 64))


@pytest.mark.parametrize(("checked", "own"), [(1, 1), (4, 2)])
def test_cuda_graphs_are_opened_for_the_pattern_that_was_checked(data: DataLayout, checked: int, own: int) -> None:
    publish(data, {"gate": {**PASSED, "train": "reduce-overhead", "micro_batches": checked}})
    choice = CompileChoice(train=True, gate=GATE)
    assert allowed_modes(choice, [OWN], data, micro_batches=own) == {"train": "reduce-overhead"}


@pytest.mark.parametrize(("checked", "own"), [(1, 2), (2, 1)])
def test_accumulation_needs_cuda_graphs_checked_with_it(data: DataLayout, checked: int, own: int) -> None:
    publish(data, {"gate": {**PASSED, "train": "reduce-overhead", "micro_batches": checked}})
    with pytest.raises(GateError, match=f"with {checked} forwards per step, here are {own}"):
        allowed_modes(CompileChoice(train=True, gate=GATE), [OWN], data, micro_batches=own)


def test_stages_need_cuda_graphs_checked_on_stages(data: DataLayout) -> None:
    publish(data, {"gate": {**PASSED, "train": "reduce-overhead", "inference": "inductor", "micro_batches": 4}})
    graphs, fewer = CompileChoice(train=True, gate=GATE), CompileChoice(train=True, inference=True, gate=GATE)
    with pytest.raises(GateError, match="on a model in one piece, here are 2 stages"):
        allowed_modes(graphs, [OWN], data, micro_batches=4, stages=2)
    assert lowest_mode(allowed_modes(fewer, [OWN], data, micro_batches=4, stages=2)) == "inductor"


def test_cuda_graphs_checked_on_stages_are_opened_for_them(data: DataLayout) -> None:
    staged = {**OWN, "parallel.pp": 2}
    publish(data, {"gate": {**PASSED, "fingerprint": staged, "train": "reduce-overhead", "micro_batches": 4}})
    choice = CompileChoice(train=True, gate=GATE)
    assert allowed_modes(choice, [OWN, staged], data, 4, stages=2) == {"train": "reduce-overhead"}


def test_a_lower_mode_for_evaluation_rules_out_cuda_graphs_in_training(data: DataLayout) -> None:
    publish(data, {"gate": {**PASSED, "train": "reduce-overhead", "inference": "inductor"}})
    modes = allowed_modes(CompileChoice(train=True, inference=True, gate=GATE), [OWN], data, micro_batches=2)
    assert lowest_mode(modes) == "inductor"


def keep(data: DataLayout, name: str, content: bytes, promised: bytes) -> tuple[CompileChoice, dict[str, str]]:
    """A choice of a gate that left compiled code, and what its manifest says of it."""
    file = data.job(GATE).artifacts / "compile_cache" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return CompileChoice(train=True, gate=GATE), {f"compile_cache/{name}": hashlib.sha256(promised).hexdigest()}


def test_what_was_compiled_is_found_by_phase_mode_and_rank(data: DataLayout) -> None:
    choice, known = keep(data, "train-inductor-1.bin", b"compiled", b"compiled")
    assert portable_caches(choice, {"train": "inductor"}, data, 1, known) == [b"compiled"]
    assert portable_caches(choice, {"train": "inductor"}, data, 0, known) == []
    assert portable_caches(choice, {"train": "aot_eager"}, data, 1, known) == []
    assert portable_caches(CompileChoice(), {}, data, 1, known) == []


def test_compiled_code_that_nobody_vouches_for_is_not_read(data: DataLayout) -> None:
    """To load it is to unpickle it: only what the manifest of a job of the same owner has, unchanged."""
    choice, known = keep(data, "train-inductor-0.bin", b"planted later", b"compiled")
    assert portable_caches(choice, {"train": "inductor"}, data, 0, known) == []
    assert portable_caches(choice, {"train": "inductor"}, data, 0, {}) == []


@pytest.mark.parametrize("rung", ["eager", None, False])
def test_a_phase_that_did_not_pass_is_refused(data: DataLayout, rung: object) -> None:
    publish(data, {"gate": {**PASSED, "train": rung}})
    with pytest.raises(GateError, match=r"compile.train: the gate of job_g+ allows (eager|nothing) for this phase"):
        allowed_modes(CompileChoice(train=True, gate=GATE), [OWN], data)


def test_no_report_is_refused(data: DataLayout) -> None:
    with pytest.raises(GateError, match=r"job_g+ has published no report.json \(No such file"):
        allowed_modes(CompileChoice(train=True, gate=GATE), [OWN], data)


@pytest.mark.parametrize("report", ["{", "{}", "[]", '{"gate": []}', '{"gate": {"train": "inductor"}}'])
def test_a_report_without_a_gate_is_refused(data: DataLayout, report: str) -> None:
    publish(data, report)
    with pytest.raises(GateError, match="holds no gate"):
        allowed_modes(CompileChoice(train=True, gate=GATE), [OWN], data)


@pytest.mark.parametrize(
    ("config", "change", "differing"),
    [
        (TRANSFORMER, {}, []),
        (TRANSFORMER, {"parallel": {"pp": 2, "tp": 2}}, ["parallel.tp"]),
        (MLP, {}, ["parallel.pp"]),
        (MLP, {"parallel": {"pp": 2, "dp_shard": 2}}, ["parallel.dp_shard", *SHARDING]),
        (MLP, {"precision": {"param": "bf16"}}, ["precision.param", *SHARDING]),
        (MLP, {"precision": {"float8": True}}, ["parallel.pp", "precision.float8"]),
    ],
)
def test_stages_take_the_gate_of_the_whole_where_blocks_are_compiled_one_by_one(
    config: ModelConfig, change: dict[str, Any], differing: list[str]
) -> None:
    """A transformer's are, and those that FSDP shards; other stages are graphs that no compile job has seen."""
    spec = TrainSpec.model_validate(
        {"model": config.model_dump(), "data": {"source": "digits"}, "steps": 1, "parallel": {"pp": 2}, **change}
    )
    checked = fingerprint(config, ModelRecipe(), CPU)
    found = difference(checked, gate_fingerprints(outline(config), ModelRecipe.from_spec(spec), spec.objective, CPU)[0])
    assert [field for field, _, _ in found] == differing
