"""Every layout trains the same model: losses, gradient norms and evaluation equal those of one process."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from launching import Torchrun
from layout_groups import Groups
from training_runs import MLP, TRANSFORMER, train

# Four blocks, so that a pipeline of two ranks can have two stages on each.
FAMILIES = {
    "mlp": {**MLP, "model": {**MLP["model"], "hidden": [32, 32, 32, 32]}},
    "transformer": {**TRANSFORMER, "model": {**TRANSFORMER["model"], "layers": 4}},
}
STEPS = 3
TEST_SAMPLES = 37  # no layout's batches divide it, so all of them pad

# Everything is computed in float64 here, so that layouts differ only by the order of its sums: 1e-16 of a value, some
# 1e-13 after steps of AdamW, which divides by gradients that are themselves small. The totals over the mesh are
# float64 in any run. Rotary tables are float32, the same for all.
TOLERANCE = 1e-10

TWO_BY_TWO = {"pp": 2, "dp_shard": 2}
# Each way to divide the model, each schedule, each recomputation; of pipelines over FSDP the schedule that computes all
# forwards first, and those with gradients of weights that come late. Others are for test_pipeline_parallel.py.
LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation": {"batch": {"micro": 4}},
    "recomputation": {"activation_checkpoint": "full", "batch": {"micro": 4}},
    "fsdp2": {"parallel": {"dp_shard": 2}},
    "fsdp2 accumulation recomputation": {
        "parallel": {"dp_shard": 2},
        "batch": {"micro": 2},
        "activation_checkpoint": "full",
    },
    "fsdp2 reduced after every micro-batch": {
        "parallel": {"dp_shard": 2},
        "batch": {"micro": 2},
        "sharding": {"reduce": "every"},
    },
    "fsdp2 reduced after every micro-batch, parameters freed": {
        "parallel": {"dp_shard": 2},
        "batch": {"micro": 2},
        "sharding": {"reduce": "every", "reshard": "always"},
    },
    "replicate2": {"parallel": {"dp_replicate": 2}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2 gpipe": {"parallel": {"pp": 2}, "pipeline": {"schedule": "gpipe"}},
    "pp2 1f1b": {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "pp2 interleaved": {"parallel": {"pp": 2}, "pipeline": {"schedule": "interleaved"}},
    "pp2 zero_bubble": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
    "pp2 zbv": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
    "pp2 1f1b recomputation": {"parallel": {"pp": 2}, "activation_checkpoint": "full"},
    "pp2 zbv recomputation": {
        "parallel": {"pp": 2},
        "pipeline": {"schedule": "zbv"},
        "activation_checkpoint": "full",
    },
    "pp2 zero_bubble selective recomputation": {
        "parallel": {"pp": 2},
        "pipeline": {"schedule": "zero_bubble"},
        "activation_checkpoint": "selective",
    },
    "pp2 1f1b compiled": {"parallel": {"pp": 2}, "compiled": "aot_eager"},
    "pp2 zero_bubble compiled": {
        "parallel": {"pp": 2},
        "pipeline": {"schedule": "zero_bubble"},
        "compiled": "aot_eager",
    },
    "hsdp2x2": {"parallel": {"dp_replicate": 2, "dp_shard": 2}},
    "fsdp2 tp2": {"parallel": {"dp_shard": 2, "tp": 2}},
    "pp2 fsdp2 gpipe": {"parallel": TWO_BY_TWO, "pipeline": {"schedule": "gpipe", "micro_batches": 2}},
    "pp2 fsdp2 zero_bubble": {"parallel": TWO_BY_TWO, "pipeline": {"schedule": "zero_bubble", "micro_batches": 4}},
    "pp2 fsdp2 zbv": {"parallel": TWO_BY_TWO, "pipeline": {"schedule": "zbv", "micro_batches": 4}},
    "pp2 tp2": {"parallel": {"pp": 2, "tp": 2}},
    "pp2 tp2 zbv": {"parallel": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zbv"}},
}
# Every layout of a transformer; MLPs under every schedule are the matter of test_pipeline_parallel.py.
OF_AN_MLP = ("fsdp2 accumulation recomputation", "hsdp2x2")
CASES = [*(("transformer", name) for name in LAYOUTS), *(("mlp", name) for name in OF_AN_MLP)]
FAST = (("transformer", "fsdp2"), ("transformer", "tp2"), ("transformer", "pp2 1f1b"), ("mlp", "hsdp2x2"))
"""One of each axis of the mesh."""


def spec_of(family: str, layout: dict[str, Any]) -> dict[str, Any]:
    base = FAMILIES[family]
    fields = {name: value for name, value in layout.items() if name != "compiled"}
    return {**base, **fields, "steps": STEPS, "batch": {**base["batch"], **layout.get("batch", {})}}


def ranks_of(layout: dict[str, Any]) -> int:
    return prod(layout.get("parallel", {}).values())


def run(folder: Path, family: str, layout: dict[str, Any]) -> dict[str, Any]:
    compile_modes = {"train": layout["compiled"]} if "compiled" in layout else {}
    spec = spec_of(family, layout)
    return train(folder, spec, test_samples=TEST_SAMPLES, state=torch.float64, compile_modes=compile_modes)


def run_all(folder: str, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        f"{family} {name}": run(Path(folder, family, name), family, LAYOUTS.get(name, {})) for family, name in cases
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> Groups:
    ranks = {(family, name): ranks_of(LAYOUTS[name]) for family, name in CASES}
    return Groups(tmp_path_factory.mktemp("layouts"), torchrun, run_all, ranks, FAST)


each_case = pytest.mark.parametrize(("family", "name"), slow_but_for(CASES, *FAST))


@pytest.mark.distributed
@each_case
def test_layout_equals_the_single_process(outcomes: Groups, family: str, name: str) -> None:
    expected, got = outcomes.expect_the_same(family, name, TOLERANCE)
    assert got["steps"] == list(range(1, STEPS + 1))
    for value in ("parameters", "data_sha256", "stopped", "eval_accuracy"):
        assert got["result"].get(value) == expected["result"].get(value), value


@pytest.mark.distributed
@each_case
def test_pipelines_say_how_long_they_were_idle(outcomes: Groups, family: str, name: str) -> None:
    """None is never idle: the last stage waits for what the first one computes."""
    measured = outcomes.of(family, name)["bubble_fraction"]
    assert len(measured) == (STEPS if "pp" in LAYOUTS[name].get("parallel", {}) else 0)
    assert all(0 < share < 1 for share in measured), measured


@pytest.mark.distributed
@each_case
def test_layers_that_cannot_be_split_are_announced(outcomes: Groups, family: str, name: str) -> None:
    """Compiled blocks compute the gradients of weights with those of inputs; all others are split."""
    lines = [line for line in outcomes.of(family, name)["logs"] if "layers of rank 0 compute" in line]
    # Two blocks of seven products on the first rank; the head is on the other one.
    expected = ["zero_bubble: 14 layers of rank 0"] if name == "pp2 zero_bubble compiled" else []
    assert [line.split(" compute")[0] for line in lines] == expected


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each == "mlp" else pytest.mark.slow) for each in FAMILIES]
)
def test_what_they_agree_on_is_learning(family: str, tmp_path: Path) -> None:
    losses = train(tmp_path, {**FAMILIES[family], "steps": 30}, test_samples=5)["loss"]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
