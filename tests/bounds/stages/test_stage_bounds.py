"""Bounds over pipeline stages, alone and with tensor-parallel ranks, are those of one process."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

METHODS_TRIED = ("ibp", "crown-ibp", "crown", "alpha-crown", "alpha-crown (fixed intermediate bounds)")
HIDDEN = {"whole values between stages": [16, 12, 20, 12, 8], "shards between stages": [16, 12, 20, 12, 16, 8]}
WHOLE, SHARDS = HIDDEN
CASES = [({"pp": 4}, [WHOLE]), ({"pp": 2, "tp": 2}, [WHOLE, SHARDS]), ({"pp": 2, "dp_shard": 2}, [WHOLE])]
"""Meshes with their networks: without tensor-parallel ranks, both networks would be cut at whole values."""
CLOSE = 1e-10


def compare(cases: list[tuple[dict[str, int], list[str]]]) -> dict[str, dict[str, float]]:
    """Differences to one process by cut, mesh and method; how much depth matters; the model's own outputs."""
    import torch

    from service.bounds.stages import StageLink
    from service.jobs.spec.common import ParallelSpec
    from service.jobs.spec.model import MlpConfig
    from service.models import build
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    device = distributed.start("cpu")
    found = {}
    for degrees, networks in cases:
        mesh = build_mesh(ParallelSpec.model_validate(degrees), "cpu")
        line = StageLink(mesh, device)
        for name in networks:
            config = MlpConfig(in_features=10, hidden=tuple(HIDDEN[name]), out_features=5)
            modules = [build(config, each, dtype=torch.float64, seed=3) for each in (None, mesh)]
            with torch.no_grad():
                for parameter in (parameter for module in modules for parameter in module.parameters()):
                    parameter.mul_(2)
            x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            bounds = _compare_bounds(*modules, x, mesh, line)
            found[f"{name} on {degrees}"] = bounds | _compare_outputs(*modules, x, line)
    distributed.stop()
    return found


def _compare_bounds(whole: Any, divided: Any, x: Any, mesh: Any, line: Any) -> dict[str, float]:
    from nets import box_around
    from stage_differences import compare_bounds

    from service.bounds.methods import METHODS, BoundOptions
    from service.bounds.network import prepare
    from service.bounds.optimise import Ascent
    from service.bounds.stages import prepare_stages

    options = BoundOptions(elements=20000, ascent=Ascent(iterations=4))
    network = prepare(whole, (10,)) if line.is_last else None
    staged = prepare_stages(divided, (10,), mesh.tp, line)
    found = compare_bounds(staged, network, box_around(x, 0.05), options, METHODS, at_once=6)
    return found | {"own": float(staged.network.is_own(staged.network.graph.input.name))}


def _compare_outputs(whole: Any, divided: Any, x: Any, line: Any) -> dict[str, float]:
    import torch

    from service.bounds.stages import InStages

    gradients = []
    for each in (InStages(divided, line), whole):
        there = x.clone().requires_grad_()
        outputs = each(there)
        gradients += [outputs, *torch.autograd.grad((outputs * outputs).sum(), there)]
    model, gradient = ((found - right).abs().max() for found, right in zip(gradients[:2], gradients[2:], strict=True))
    return {"model": float(model), "gradient": float(gradient)}


@pytest.mark.parametrize(
    "cases",
    [pytest.param([({"pp": 2}, [WHOLE])], id="two stages"), pytest.param(CASES, marks=pytest.mark.slow, id="all")],
)
def test_stages_find_the_bounds_of_one_process(torchrun: Any, cases: list[tuple[dict[str, int], list[str]]]) -> None:
    ranks = prod(cases[0][0].values())
    results = torchrun(compare, ranks, cases=cases)
    last = results[-1]
    assert len(last) == sum(len(networks) for _, networks in cases)
    for name, found in last.items():
        assert found["width of crown-ibp"] > 2 * found["width of crown"], "depth was not tested"
        assert found["width of alpha-crown"] < 0.99 * found["width of crown"], "nothing was optimised"
        for method in METHODS_TRIED:
            assert found[method] <= CLOSE, (name, method)
            everywhere = [result[name][f"sum of {method}"] for result in results]
            assert everywhere == [pytest.approx(everywhere[0], rel=1e-12)] * ranks, (name, method)
        for result in results:
            assert result[name]["model"] <= CLOSE
            assert result[name]["gradient"] <= CLOSE
    assert any(found["own"] for found in last.values()) == (cases is CASES), "where a stage begins with shards"
