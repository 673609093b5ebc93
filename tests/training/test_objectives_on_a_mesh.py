"""Convnets and certified training: every layout gives the losses and gradient norms of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lanes import slow_but_for
from launching import Torchrun
from layout_groups import Groups
from training_runs import MLP, train

STEPS = 3
TEST_SAMPLES = 37
# As for the other layouts: sums of float32 in another order, after three steps of AdamW.
TOLERANCE = 2e-5

CONVNET = {
    **MLP,
    "model": {
        "family": "convnet",
        "height": 8,
        "width": 8,
        "channels": [4, 8, 4],
        "stride": 1,
        "pool": 2,
        "hidden": [16],
        "out_features": 10,
    },
}
SUBJECTS: dict[str, dict[str, Any]] = {
    "convnet": CONVNET,
    "ibp": {**MLP, "objective": {"name": "certified", "eps": 0.1, "warmup": 1, "ramp": 2}},
    "crown-ibp": {
        **MLP,
        "objective": {"name": "certified", "eps": 0.1, "bound": "crown-ibp", "ramp": 4, "kappa": 0.2, "beta": 0.3},
    },
}
SUBJECTS["ibp of a convnet"] = {**CONVNET, "objective": {"name": "certified", "eps": 0.05, "ramp": 2}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"parallel": {"dp_shard": 2}},
    "fsdp2 accumulation": {"parallel": {"dp_shard": 2}, "batch": {"micro": 3}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2}},
    "pp2 zbv": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
    "pp2 zero_bubble": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
    "pp2 tp2": {"parallel": {"pp": 2, "tp": 2}},
    "fsdp2 tp2": {"parallel": {"dp_shard": 2, "tp": 2}},
}
WITHOUT = {  # what another subject shows already, and what a backward pass over bounds cannot do
    "convnet": {"fsdp2 accumulation", "pp2 zero_bubble", "pp2 tp2", "fsdp2 tp2"},
    "ibp": {"pp2 zbv"},
    "ibp of a convnet": {"fsdp2", "fsdp2 accumulation", "fsdp2 tp2", "pp2 zero_bubble", "pp2 tp2"},
    "crown-ibp": {"fsdp2 accumulation", "fsdp2 tp2", *(name for name in LAYOUTS if "pp2" in name)},
}
CASES = [(subject, layout) for subject in SUBJECTS for layout in LAYOUTS if layout not in WITHOUT.get(subject, ())]
FAST = (("ibp", "tp2"),)


def spec_of(subject: str, layout: dict[str, Any]) -> dict[str, Any]:
    base = SUBJECTS[subject]
    return {**base, **layout, "steps": STEPS, "batch": {**base["batch"], **layout.get("batch", {})}}


def run_all(folder: str, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        f"{subject} {layout}": train(
            Path(folder, subject, layout), spec_of(subject, LAYOUTS.get(layout, {})), test_samples=TEST_SAMPLES
        )
        for subject, layout in cases
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> Groups:
    ranks = {(subject, layout): 2 ** len(LAYOUTS[layout]["parallel"]) for subject, layout in CASES}
    return Groups(tmp_path_factory.mktemp("objectives"), torchrun, run_all, ranks, FAST)


@pytest.mark.distributed
@pytest.mark.parametrize(("subject", "layout"), slow_but_for(CASES, *FAST))
def test_layout_equals_the_single_process(outcomes: Groups, subject: str, layout: str) -> None:
    expected, got = outcomes.expect_the_same(subject, layout, TOLERANCE)
    for value in ("parameters", "eval_accuracy", "eval_certified_accuracy"):
        assert got["result"].get(value) == expected["result"].get(value), value
