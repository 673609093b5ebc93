"""Rigorous bounds of pipeline stages, against rational numbers and against those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rigorous_ranks import LOOSER, above_values, bounds_of, check_searches, mlps, outside, searches


def cut_into_stages(graph: Any, axis: Any, line: Any) -> Any:
    from service.bounds.graph_module import ExecutableGraph
    from service.bounds.shard import shard
    from service.bounds.stages import InStages, divide_into_stages
    from service.verification.bab.model import ModelUnderVerification
    from service.verification.engine import RIGOROUS, StagesEngine

    staged = divide_into_stages(shard(graph, axis), axis, line)
    module = InStages(ExecutableGraph(staged.network.graph), line)
    return ModelUnderVerification(module, StagesEngine(staged, RIGOROUS), module, None, torch.float64)


pytestmark = pytest.mark.distributed

MESHES = [({"pp": 2, "tp": 2}, (8, 6, 8, 6, 8)), ({"pp": 4}, (8, 6, 8, 6))]
"""With the widths of an MLP's hidden layers: the first has shards between its stages."""


def in_stages() -> dict[str, dict[str, Any]]:
    """Compare bounds of pipeline stages, with shards between them and with whole values, with those of one process."""
    from nets import box_around
    from rigorous_problems import both_sides

    from service.bounds.methods import METHODS, BoundOptions
    from service.bounds.network import prepare
    from service.bounds.optimise import Ascent
    from service.bounds.stages import StageLink, prepare_stages
    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    device = distributed.start("cpu")
    found: dict[str, dict[str, Any]] = {}
    for degrees, hidden in MESHES:
        mesh = build_mesh(ParallelSpec.model_validate(degrees), "cpu")
        line = StageLink(mesh, device)
        whole, divided, exactly, shape = mlps(mesh, *hidden)
        staged, alone = prepare_stages(divided, shape, mesh.tp, line), prepare(whole, shape)
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        rows = both_sides(2)
        for method in ("ibp", "crown", "alpha-crown"):
            box, options = box_around(x, 0.1), BoundOptions(elements=2**14, ascent=Ascent(iterations=4))
            analysis = staged.method(METHODS[method].rigorous)(staged.network, box, options)
            lower, negated = analysis.lower_bounds(rows)[0].chunk(2)
            ours, expected = torch.stack([lower, -negated]), bounds_of(alone, box, method)
            corners = (torch.rand(4, *shape, generator=torch.Generator().manual_seed(2)) < 0.5).unbind()
            points = [torch.where(corner, box.upper[0], box.lower[0]) for corner in corners]
            slopes, constants = analysis.planes(rows)
            widths = [float((upper - lower).mean()) for lower, upper in (ours, expected)]
            found[f"{hidden} on {degrees}, {method}"] = {
                "outside": outside(ours, exactly, points) + above_values(slopes[0], constants[0], exactly, points),
                "looser": widths[0] / widths[1] - 1,
                "bounds": ours.tolist(),
                "planes": [slopes.tolist(), constants.tolist()],
            }
        if mesh.tp.size > 1:  # of four stages some have no activations, and nothing to be split
            divide = partial(cut_into_stages, axis=mesh.tp, line=line)
            found["searches"] = searches(divide, "ACTIVATIONS")
    distributed.stop()
    return found


@pytest.mark.slow
def test_stages_find_rigorous_bounds_that_are_as_tight_as_those_of_one_process(torchrun: Any) -> None:
    first, *others = torchrun(in_stages, 4)
    assert all(each == first for each in others), "ranks have the same bounds to the last bit"
    check_searches(first.pop("searches"))
    for name, found in first.items():
        assert found["outside"] == 0, name
        assert found["looser"] <= LOOSER, name
