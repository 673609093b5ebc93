"""Every layout trains the same model: losses, gradient norms and evaluation equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import Torchrun
from training_runs import MLP, TRANSFORMER, train

FAMILIES = {"mlp": MLP, "transformer": TRANSFORMER}
STEPS = 4
TEST_SAMPLES = 37  # no layout's batches divide it, so all of them pad

# What differs between layouts is the order of float32 sums: some 1e-7 of a value (eps is 6e-8), and up to 2e-6 after
# four steps of AdamW, which divides by gradients that are themselves small. A wrong scale, a parameter counted twice
# or a lost micro-batch shows as 1e-3 at least.
TOLERANCE = 2e-5

LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation": {"batch": {"micro": 4}},
    "recomputation": {"activation_checkpoint": "full", "batch": {"micro": 4}},
    "fsdp2": {"parallel": {"dp_shard": 2}},
    "fsdp2 accumulation recomputation": {
        "parallel": {"dp_shard": 2},
        "batch": {"micro": 2},
        "activation_checkpoint": "full",
    },
    "replicate2": {"parallel": {"dp_replicate": 2}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2 gpipe": {"parallel": {"pp": 2}, "pipeline": {"schedule": "gpipe"}},
    "pp2 1f1b": {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "pp2 1f1b recomputation": {"parallel": {"pp": 2}, "activation_checkpoint": "full"},
    "hsdp2x2": {"parallel": {"dp_replicate": 2, "dp_shard": 2}},
    "fsdp2 tp2": {"parallel": {"dp_shard": 2, "tp": 2}},
    "pp2 fsdp2 gpipe": {"parallel": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "gpipe", "micro_batches": 2}},
    "pp2 fsdp2 1f1b": {"parallel": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "1f1b", "micro_batches": 4}},
    "pp2 tp2": {"parallel": {"pp": 2, "tp": 2}},
}


def spec_of(family: str, layout: dict[str, Any]) -> dict[str, Any]:
    base = FAMILIES[family]
    return {**base, **layout, "steps": STEPS, "batch": {**base["batch"], **layout.get("batch", {})}}


def ranks_of(layout: dict[str, Any]) -> int:
    degrees: list[int] = list(layout.get("parallel", {}).values())
    product = 1
    for degree in degrees:
        product *= degree
    return product


def run_all(folder: str, world: int) -> dict[str, Any]:
    """On each rank: all layouts of this many ranks in turn, since starting processes is what takes time."""
    return {
        f"{family} {name}": train(Path(folder, family, name), spec_of(family, layout), test_samples=TEST_SAMPLES)
        for family in FAMILIES
        for name, layout in LAYOUTS.items()
        if ranks_of(layout) == world
    }


class Outcomes:
    """Results by family and layout; each group of ranks is launched when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.single = {
            family: train(folder / "single" / family, spec_of(family, {}), test_samples=TEST_SAMPLES)
            for family in FAMILIES
        }
        self._of_ranks: dict[int, dict[str, Any]] = {}

    def of(self, family: str, name: str) -> dict[str, Any]:
        ranks = ranks_of(LAYOUTS[name])
        if ranks not in self._of_ranks:
            self._of_ranks[ranks] = self._run(ranks)
        return self._of_ranks[ranks][f"{family} {name}"]

    def _run(self, ranks: int) -> dict[str, Any]:
        if ranks == 1:
            return run_all(str(self.folder), 1)
        launches = self.folder / f"launch-{ranks}"
        launches.mkdir()
        results: dict[str, Any] = Torchrun(launches)(run_all, ranks, folder=str(self.folder), world=ranks)[0]
        return results


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("layouts"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_equals_the_single_process(outcomes: Outcomes, family: str, name: str) -> None:
    expected, got = outcomes.single[family], outcomes.of(family, name)
    assert got["steps"] == list(range(1, STEPS + 1))
    for series in ("loss", "grad_norm", "eval_loss"):
        assert got[series] == pytest.approx(expected[series], rel=TOLERANCE, abs=0), series
    for value in ("parameters", "data_sha256", "stopped", "eval_accuracy"):
        assert got["result"].get(value) == expected["result"].get(value), value


@pytest.mark.parametrize("family", FAMILIES)
def test_single_process_learns(outcomes: Outcomes, family: str) -> None:
    losses = outcomes.single[family]["loss"]
    assert losses[-1] < losses[0] * 0.99
