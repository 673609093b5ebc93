"""A training job that names a compile job as its gate is refused where that checked something else."""

from __future__ import annotations

from typing import Any

import pytest
from checked_specs import (
    CERTIFIED,
    DEEP,
    A,
    B,
    found,
    job,
    spec,
)

from service.jobs.spec.objective import Certified

BY_THE_GATE = {"train": True, "gate": A}
TWICE = {"global": 32, "micro": 8}


@pytest.mark.parametrize(
    ("own", "checked", "expected"),
    [
        ({}, {}, []),
        ({}, {"model": DEEP}, [("model.hidden", [8, 12], "the model of the gate's job, or another compile.gate")]),
        ({"model": {"job": B}}, {}, []),
        (
            {"model": {"job": B}},
            {"model": DEEP},
            [("compile.gate", A, "the model of the gate's job, or another compile.gate")],
        ),
        ({"precision": {"param": "bf16"}}, {"precision": {"param": "bf16"}}, []),
        ({"precision": {"param": "bf16"}}, {}, [("precision.param", "bf16", "fp32, or another compile.gate")]),
        (
            {"activation_checkpoint": "full"},
            {},
            [("activation_checkpoint", "full", "none, or another compile.gate")],
        ),
        ({}, {"parallel": {"tp": 2}}, [("parallel.tp", 1, "2, or another compile.gate")]),
        ({"parallel": {"dp_shard": 2}}, {}, [("parallel.dp_shard", 2, "1, or another compile.gate")]),
        ({}, {"parallel": {"pp": 2}}, [("parallel.pp", 1, "2, or another compile.gate")]),
        ({"parallel": {"pp": 2}}, {"shapes": [16]}, []),  # whether a whole model stands for its stages, only ranks know
        ({"parallel": {"pp": 2}}, {"parallel": {"pp": 2}, "shapes": [16]}, []),
        ({}, {"shapes": [8, 16]}, [("batch.global", 64, "forwards of 8 or 16, or a compile job with shapes of [64]")]),
        (
            {"batch": {"global": 64, "micro": 16}},
            {"shapes": [8]},
            [("batch.micro", 16, "forwards of 8, or a compile job with shapes of [16]")],
        ),
        ({"batch": {"global": 10, "micro": 4}}, {"shapes": [8]}, [("batch.micro", 4, "a divisor of 10")]),
        (
            {"parallel": {"pp": 2}, "pipeline": {"schedule": "gpipe"}},
            {"parallel": {"pp": 2}, "shapes": [16]},
            [("pipeline.schedule", "gpipe", "1f1b, or another compile.gate")],
        ),
        (
            {"parallel": {"dp_shard": 2}, "batch": TWICE},
            {"parallel": {"dp_shard": 2}, "shapes": [8]},
            [("sharding.reshard", "never", "always, or another compile.gate")],
        ),
        (
            {"parallel": {"dp_shard": 2}, "batch": TWICE},
            {"parallel": {"dp_shard": 2}, "micro_batches": 2, "shapes": [8]},
            [],
        ),
        (
            {"parallel": {"tp": 2}, "batch": TWICE},
            {"parallel": {"tp": 2}, "shapes": [8]},
            [],
        ),  # there is nothing to reshard
        (
            {"compile": {"train": True, "inference": True, "gate": A}},
            {"phases": ["train"]},
            [("compile.inference", True, "false, or a compile job with the phase inference")],
        ),
        ({"objective": {"name": "cross_entropy"}}, {"objective": "cross_entropy"}, []),
        ({"compile": {"gate": A}}, {"model": DEEP}, []),  # nothing is to be compiled
        ({}, {"modes": ["eager"]}, [("compile.gate", A, "more modes")]),
        (
            {"objective": CERTIFIED},
            {},
            [
                (
                    "objective",
                    str(Certified.model_validate(CERTIFIED).model_dump(mode="json")),
                    "the objective of the gate's job, or another compile.gate",
                ),
                ("compile.train", True, "false"),
            ],
        ),
    ],
)
def test_a_gate_that_was_made_for_another_job_is_refused(
    own: dict[str, Any], checked: dict[str, Any], expected: list[tuple[str, Any, str]]
) -> None:
    asked = spec("train", **{"compile": BY_THE_GATE, **own})
    assert found(asked, job(A, "compile", **checked), job(B)) == expected
