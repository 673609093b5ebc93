"""Forms that a spec takes: shorthands, references, defaults that depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from service.jobs.kinds.registry import KINDS, spec_adapter
from service.jobs.spec.compile import CompileSpec, Tolerance
from service.jobs.spec.data import SOURCES
from service.jobs.spec.model import FromSafetensors, MlpConfig
from service.jobs.spec.objective import Certified, CrossEntropy
from service.jobs.spec.verify import Robustness

FILE = "file_" + "0a" * 32
MLP = {"family": "mlp", "in_features": 64, "hidden": [8], "out_features": 10}
CONVNET = {"family": "convnet", "height": 8, "width": 8, "out_features": 10}
BASE: dict[str, Any] = {"kind": "train", "model": MLP, "data": {"source": "digits"}, "steps": 4}


def read(**fields: Any) -> Any:
    return spec_adapter.validate_python({**BASE, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"objective": "cross_entropy"},
        {"objective": {"name": "certified", "eps": 0.1}},
        {"model": {"safetensors": FILE, **MLP}},
        {"model": CONVNET},
        {"checkpoint": {"async": False}},
        {"pipeline": {"schedule": "zbv"}},
        {"precision": {"float8": True}, "activation_checkpoint": "selective"},
    ],
)
def test_a_spec_survives_being_stored(fields: dict[str, Any]) -> None:
    spec = read(**fields)
    assert spec_adapter.validate_json(spec.model_dump_json(by_alias=True)) == spec


def test_a_bare_name_is_an_objective() -> None:
    assert read().objective == read(objective="cross_entropy").objective == CrossEntropy()
    assert read(objective={"name": "certified", "eps": 0.5}).objective == Certified(eps=0.5)


def test_a_number_that_would_not_survive_is_refused() -> None:
    config = {"model_type": "gpt2", "vocab_size": 256, "layer_norm_epsilon": float("inf")}
    with pytest.raises(ValidationError, match=r"config\.layer_norm_epsilon\n.*not JSON compliant"):
        read(model={"family": "huggingface", "config": config, "sequence": 8})
    with pytest.raises(ValidationError, match=r"jobs\.a\.name\n.*surrogates"):
        spec_adapter.validate_python({"kind": "chain", "jobs": {"a": {**BASE, "name": "\ud800"}}})


@pytest.mark.parametrize(("lower", "upper"), [(2, -1), (0.5, 0.5)])
def test_limits_of_inputs_may_not_cross(lower: float, upper: float) -> None:
    with pytest.raises(ValidationError, match=f"lower: .* expected less than upper={float(upper)}"):
        read(objective={"name": "certified", "eps": 0.5, "lower": lower, "upper": upper})


def test_a_file_of_weights_stands_beside_its_configuration() -> None:
    model = read(model={"safetensors": FILE, **MLP}).model
    assert model == FromSafetensors(safetensors=FILE, config=MlpConfig.model_validate(MLP))
    assert type(model.config) is MlpConfig
    with pytest.raises(ValidationError, match=r"model\.safetensors\.mlp\.hiden"):
        read(model={"safetensors": FILE, **MLP, "hiden": 3})


@pytest.mark.parametrize(
    ("schedule", "asked", "stages"),
    [
        ("gpipe", None, 4),
        ("1f1b", 1, 4),
        ("zero_bubble", None, 4),
        ("interleaved", None, 8),
        ("interleaved", 3, 12),
        ("zbv", None, 8),
        ("zbv", 2, 8),
    ],
)
def test_a_schedule_has_its_number_of_stages(schedule: str, asked: int | None, stages: int) -> None:
    pipeline = {"schedule": schedule, "virtual_stages": asked}
    assert read(pipeline=pipeline, parallel={"pp": 4}).stages == stages
    assert read(pipeline=pipeline).stages == 1


@pytest.mark.parametrize(("schedule", "asked"), [("gpipe", 2), ("1f1b", 3), ("zero_bubble", 2), ("zbv", 1), ("zbv", 3)])
def test_a_schedule_refuses_other_numbers(schedule: str, asked: int) -> None:
    with pytest.raises(ValidationError, match=f"schedule={schedule} has [12] stages? on each rank; expected [12]"):
        read(pipeline={"schedule": schedule, "virtual_stages": asked})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel": 4}, "kernel=4 is even"),
        ({"pool": 4, "channels": [4, 4, 4]}, "nothing is left of 8×8 after layer 1"),
        ({"channels": []}, "at least 1 item"),
    ],
)
def test_a_convnet_that_cannot_be_built_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        read(model={**CONVNET, **change})


@pytest.mark.parametrize(
    "kind", [kind for kind, each in KINDS.provided.items() if "model" in each.declaration.config.model_fields]
)
def test_the_schema_has_every_family_and_source(kind: str) -> None:
    definitions = KINDS.declaration(kind).config.model_json_schema()["$defs"]
    assert {"MlpConfig", "ConvnetConfig", "TransformerConfig", "ConvnetConfigWithFile", "FromJob"} <= definitions.keys()
    assert {each.declaration.config.__name__ for each in SOURCES.provided.values()} <= definitions.keys()


def test_a_phase_of_a_compile_check_is_there_once() -> None:
    with pytest.raises(ValidationError, match="a phase is there twice"):
        CompileSpec.model_validate({"model": MLP, "phases": ["train", "train"]})


def test_coarse_arithmetic_is_judged_by_a_wider_tolerance_unless_one_is_said() -> None:
    model = {"family": "mlp", "in_features": 2, "hidden": [2], "out_features": 2}
    said = {"absolute": 1e-2, "ratio": 4}

    def permitted(**fields: Any) -> Tolerance:
        spec = CompileSpec.model_validate({"model": model, **fields})
        return CompileSpec.model_validate_json(spec.model_dump_json(by_alias=True)).permitted

    assert permitted() == Tolerance()
    assert permitted(precision={"param": "bf16"}) == Tolerance(absolute=1e-3, ratio=3)
    assert permitted(precision={"param": "bf16"}, tolerance=said) == Tolerance.model_validate(said)
    assert permitted(precision={"param": "bf16"}, tolerance={"absolute": 1e-4, "ratio": 2}) == Tolerance()


@pytest.mark.parametrize("change", [{"eps": True}, {"clip": [False, True]}])
def test_true_is_no_number_of_a_property(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="a valid number"):
        Robustness.model_validate({"data": {"source": "digits"}, "eps": 0.1, **change})
