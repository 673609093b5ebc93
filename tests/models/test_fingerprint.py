"""Fingerprints: equal for the same configuration, and telling for another one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.jobs.spec.train import ShardingSpec
from service.models.parallelize import ModelRecipe, fingerprint, sources_of
from service.training.gate import difference

CPU = torch.device("cpu")
MODEL = MlpConfig(in_features=64, hidden=(32, 32), out_features=10)


@pytest.mark.parametrize("config", [MODEL, TransformerConfig()])
def test_survives_json_and_equals_itself(config: MlpConfig | TransformerConfig) -> None:
    own = fingerprint(config, ModelRecipe(parallel=ParallelSpec(tp=2)), CPU)
    recorded = json.loads(json.dumps(own))
    assert recorded == own
    assert difference(recorded, own) == []
    assert all(isinstance(value, str | int | float) for value in own.values())


@pytest.mark.parametrize(
    ("config", "parallel", "field"),
    [
        (MODEL.model_copy(update={"hidden": (32, 16)}), ParallelSpec(), "model.hidden"),
        (MODEL.model_copy(update={"activation": "gelu"}), ParallelSpec(), "model.activation"),
        (MODEL, ParallelSpec(tp=2), "parallel.tp"),
    ],
)
def test_names_the_field_that_differs(config: MlpConfig, parallel: ParallelSpec, field: str) -> None:
    recorded = fingerprint(MODEL, ModelRecipe(), CPU)
    own = fingerprint(config, ModelRecipe(parallel), CPU)
    assert difference(recorded, own) == [(field, recorded[field], own[field])]


@pytest.mark.parametrize(
    ("precision", "recomputed", "field"),
    [
        (PrecisionSpec(param="bf16"), "none", "precision.param"),
        (PrecisionSpec(reduce="bf16"), "none", "precision.reduce"),
        (PrecisionSpec(float8=True), "none", "precision.float8"),
        (PrecisionSpec(), "selective", "activation_checkpoint"),
    ],
)
def test_names_the_arithmetic_that_differs(
    precision: PrecisionSpec, recomputed: ActivationCheckpoint, field: str
) -> None:
    recorded = fingerprint(MODEL, ModelRecipe(), CPU)
    own = fingerprint(MODEL, ModelRecipe(precision=precision, activation_checkpoint=recomputed), CPU)
    found = [each for each in difference(recorded, own) if not each[0].startswith("sharding.")]  # comes with FSDP
    assert found == [(field, recorded[field], own[field])]


@pytest.mark.parametrize(
    ("sharding", "field"), [({"reshard": "never"}, "sharding.reshard"), ({"reduce": "every"}, "sharding.reduce")]
)
def test_names_what_fsdp_keeps_only_where_it_manages_the_model(sharding: dict[str, str], field: str) -> None:
    other, four = ShardingSpec.model_validate(sharding).resolved(4), ShardingSpec(reshard="always").resolved(4)
    for parallel, differing in ((ParallelSpec(dp_shard=2), [field]), (ParallelSpec(tp=2), [])):
        recorded = fingerprint(MODEL, ModelRecipe(parallel, sharding=four), CPU)
        own = fingerprint(MODEL, ModelRecipe(parallel, sharding=other), CPU)
        found = [each for each, *_ in difference(recorded, own)]
        assert [each for each in found if each == field] == differing


def test_sharding_among_more_ranks_is_another_mesh() -> None:
    recorded = fingerprint(MODEL, ModelRecipe(ParallelSpec(dp_shard=2)), CPU)
    own = fingerprint(MODEL, ModelRecipe(ParallelSpec(dp_shard=4)), CPU)
    assert difference(recorded, own) == [("parallel.dp_shard", 2, 4)]


def test_a_missing_field_is_a_difference() -> None:
    own = fingerprint(MODEL, ModelRecipe(), CPU)
    recorded = {name: value for name, value in own.items() if name != "torch"}
    assert difference(recorded, own) == [("torch", "absent", torch.__version__)]
    assert difference(own, recorded) == [("torch", torch.__version__, "absent")]


def test_other_sources_of_a_package_are_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is installed to be edited, whose version stays."""
    (tmp_path / "edited_package").mkdir()
    (tmp_path / "edited_package" / "__init__.py").write_text("def make(): ...")
    (inner := tmp_path / "edited_package" / "inner.py").write_text("RATE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_package" / ".#inner.py").symlink_to("nowhere")
    before = sources_of("edited_package.inner:make")
    assert sources_of("edited_package:make") == before
    inner.write_text("RATE = 2")
    assert sources_of("edited_package:make") != before


def test_another_version_of_an_installed_family_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(version: str) -> dict[str, str | int | float]:
        family = replace(FAMILIES.provided["mlp"], distribution="somebodys-models", version=version)
        monkeypatch.setitem(FAMILIES.provided, "mlp", family)
        return fingerprint(MODEL, ModelRecipe(), CPU)

    found = difference(installed("1.0"), installed("1.1"))
    assert found == [("model.package", "somebodys-models 1.0", "somebodys-models 1.1")]
