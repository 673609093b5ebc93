"""Optimised bounds on a tensor-parallel mesh: the gradient needs the adjoint collectives, and replicas one value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

METHODS = ["alpha-crown", "alpha-crown (fixed intermediate bounds)"]


def _settings() -> Iterator[tuple[int, dict[str, Any]]]:
    """Two blocks with replicated activations between and behind them, on two ranks and on four."""
    import torch
    from nets import box_around

    from service.bounds.network import prepare
    from service.jobs.spec.common import ParallelSpec
    from service.jobs.spec.model import MlpConfig
    from service.models import build
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    distributed.start("cpu")
    config = MlpConfig(in_features=6, hidden=(8, 12, 16, 12), out_features=3)
    for ranks in (2, 4):
        mesh = build_mesh(ParallelSpec(dp_shard=4 // ranks, tp=ranks), "cpu")
        modules = [build(config, each, dtype=torch.float64, seed=3) for each in (None, mesh)]
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    parameter.mul_(2.5)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        whole, divided = prepare(modules[0], (6,)), prepare(modules[1], (6,), mesh.tp)
        yield (
            ranks,
            {"whole": whole, "divided": divided, "module": modules[0], "box": box_around(x, 0.1), "axis": mesh.tp},
        )


def _lower(network: Any, box: Any, method: str) -> Any:
    from nets import output_bounds

    from service.bounds.methods import BoundOptions
    from service.bounds.optimise import Ascent

    return output_bounds(network, box, method, BoundOptions(ascent=Ascent(iterations=5))).lower


def _least(setting: dict[str, Any]) -> Any:
    """The smallest outputs that samples show."""
    import torch
    from nets import samples

    with torch.no_grad():
        inputs = samples(setting["box"], 4000, torch.Generator().manual_seed(1))
        return setting["module"](inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2]).amin(dim=0)


def _undivided(*arguments: Any, **keywords: Any) -> Any:
    from service.bounds.linear.plain import Pass

    return Pass(*arguments, **{**keywords, "divided": False})


def _identity(self: Any, replicated: Any) -> Any:
    return replicated


def _nothing(self: Any, name: str, parameter: Any) -> None:
    pass


def optimise() -> dict[str, dict[str, float]]:
    """Differences to one process, how far bounds lie above samples, and the same under each mistake.

    Mistakes are tried on four ranks and with fixed intermediate bounds, all of them being about the rows' gradient;
    rows that are not divided too with fixed ones only.
    """
    import torch

    from service.bounds.methods import layers
    from service.bounds.optimise import RowOptimiser
    from service.bounds.rank_group import RankGroup
    from service.parallel import distributed

    whole_rows = patch.object(layers, "Pass", _undivided)
    mistakes = {
        "none": [],
        "none, rows not divided": [whole_rows],
        "no adjoint": [patch.object(RankGroup, "join", RankGroup.gather)],
        "no adjoint, rows not divided": [whole_rows, patch.object(RankGroup, "enter", _identity)],
        "no adjoint, replicas apart": [
            whole_rows,
            patch.object(RankGroup, "enter", _identity),
            patch.object(RowOptimiser, "_keep_equal", _nothing),
        ],
    }
    found = {}
    for ranks, setting in _settings():
        least, plain = _least(setting), _lower(setting["whole"], setting["box"], "crown")
        right = {method: _lower(setting["whole"], setting["box"], method) for method in METHODS}
        for (mistake, patches), method in product(mistakes.items(), METHODS):
            is_tried = mistake == "none" or (method == METHODS[1] and (ranks == 4 or mistake.startswith("none")))
            if not is_tried:
                continue
            with ExitStack() as stack:
                for each in patches:
                    stack.enter_context(each)
                bounds = _lower(setting["divided"], setting["box"], method)
            found[f"{mistake}: {method} on {ranks}"] = {
                "difference": float((bounds - right[method]).abs().max() / right[method].abs().max()),
                "above": float((bounds - least).max()),
                "gain": float((right[method] - plain).mean() / plain.abs().mean()),
            }
    torch.distributed.barrier()
    distributed.stop()
    return found


def test_optimised_bounds_need_the_adjoint_collectives(torchrun: Any) -> None:
    for result in torchrun(optimise, 4):
        assert len(result) == 2 * 3 + 3
        for name, found in result.items():
            if name.startswith("none"):
                assert found["difference"] <= 1e-10, name
                assert found["above"] <= 0, name
                assert found["gain"] > 0.01, "there was nothing to optimise"
            else:
                assert found["difference"] > 1e-6, f"{name} would not be noticed"
            if "apart" in name:
                assert found["above"] > 0.1, f"{name} is unsound, and samples show it"
