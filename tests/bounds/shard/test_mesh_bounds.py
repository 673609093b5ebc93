"""Bounds on a tensor-parallel mesh are those of one process, and the tests would notice if they were not."""

from __future__ import annotations

from typing import Any

import pytest
from lanes import slow_but_for

pytestmark = pytest.mark.distributed

PLAIN = ["ibp", "crown-ibp", "crown"]
"""Methods that optimise nothing; those that do are in ``test_mesh_optimised``."""

HIDDEN = {"four blocks": [16, 12, 24, 12, 16, 8, 16], "whole features at the head": [16, 12, 24, 12, 16, 8, 16, 8]}


def _setting(hidden: list[int], activation: str, dtype: str, radius: float) -> dict[str, Any]:
    """Both networks, boxes and the single process's bounds; ``divided`` bounds with the group's ranks."""
    import torch
    from meshes import start_mesh
    from nets import box_around, output_bounds

    from service.bounds.methods import BoundOptions
    from service.bounds.network import prepare
    from service.jobs.spec.model import MlpConfig
    from service.models import build

    mesh = start_mesh(tp=2)
    precision = getattr(torch, dtype)
    config = MlpConfig(in_features=10, hidden=tuple(hidden), out_features=5, activation=activation)  # type: ignore[arg-type]
    modules = [build(config, each, dtype=precision, seed=3) for each in (None, mesh)]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.mul_(2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 10, generator=generator, dtype=torch.float64).to(precision)
    whole, divided = prepare(modules[0], (10,)), prepare(modules[1], (10,), mesh.tp)
    box = box_around(x, radius)

    def bounds(network: Any, method: str, options: Any = None) -> Any:
        found = output_bounds(network, box, method, options or BoundOptions())
        return torch.cat([found.lower, found.upper], dim=1)

    return {"whole": whole, "divided": divided, "bounds": bounds, "module": modules[0], "box": box}


def _difference(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def compare(hidden: list[int], activation: str, dtype: str) -> dict[str, float]:
    from service.bounds.methods import BoundOptions
    from service.parallel import distributed

    setting = _setting(hidden, activation, dtype, 0.05)
    cases = {
        "": BoundOptions(),
        " plain": BoundOptions(intersect=False),
        " in small parts": BoundOptions(elements=1000),
    }
    found = {}
    for method in PLAIN:
        for name, options in cases.items():
            both = [setting["bounds"](setting[which], method, options) for which in ("divided", "whole")]
            found[method + name] = _difference(*both)
    own = setting["divided"].is_own(setting["divided"].nonlinear[0].inputs[0])
    largest = [_largest(setting["bounds"], setting[which]) for which in ("divided", "whole")]
    widths = [
        float(setting["bounds"](setting["whole"], method)[:, 5:].abs().mean()) for method in ("crown-ibp", "crown")
    ]
    distributed.stop()
    return {**found, "own": own, "looser": widths[0] / widths[1], "share": largest[0] / largest[1]}


def _largest(bounds: Any, network: Any) -> int:
    """Entries of the largest coefficients that wait at a node in CROWN's passes."""
    from unittest.mock import patch

    from torch import Tensor

    from service.bounds.linear.row_traversal import RowTraversal

    sizes, propagate = [0], RowTraversal.propagate

    def record(self: RowTraversal, *arguments: Any) -> Any:
        arriving = propagate(self, *arguments)
        sizes.extend(pending.rows.numel() for _, pending in arriving if isinstance(pending.rows, Tensor))
        return arriving

    with patch.object(RowTraversal, "propagate", record):
        bounds(network, "crown")
    return max(sizes)


@pytest.mark.parametrize(
    ("hidden", "activation", "dtype", "tolerance"),
    slow_but_for(
        [
            ("four blocks", "relu", "float64", 1e-10),
            ("four blocks", "relu", "float32", 2e-5),
            ("whole features at the head", "gelu", "float64", 1e-10),
        ],
        ("four blocks", "relu", "float64", 1e-10),
    ),
)
def test_two_ranks_find_the_bounds_of_one(
    torchrun: Any, hidden: str, activation: str, dtype: str, tolerance: float
) -> None:
    results = torchrun(compare, 2, hidden=HIDDEN[hidden], activation=activation, dtype=dtype)
    for result in results:
        assert result.pop("own"), "hidden neurons must be divided, or nothing was tested"
        assert result.pop("share") <= 0.75, "rows or values are divided everywhere but where a region ends"
        assert result.pop("looser") > 2, "interval bounds in place of CROWN's must show, or depth was not tested"
        assert {name: difference for name, difference in result.items() if not difference <= tolerance} == {}


REPLICATED = {"replicated biases counted once per rank", "no all-reduce at the column-parallel layer"}


def break_it() -> dict[str, dict[str, float]]:
    """How far bounds move under each mistake that tensor parallelism invites, and by how much samples then leave."""
    import torch
    from nets import samples

    from service.parallel import distributed

    setting = _setting(HIDDEN["four blocks"], "relu", "float64", 0.05)
    outputs = torch.stack(
        [setting["module"](x) for x in samples(setting["box"], 200, torch.Generator().manual_seed(1))]
    )
    outputs = outputs.detach()
    found = {}
    for name, mistake in _mistakes().items():
        with mistake:
            # Intervals go forward, the rest is about going backward; CROWN has rows divided, so nothing is replicated.
            method = "ibp" if "summand" in name else "crown-ibp" if name in REPLICATED else "crown"
            bounds = setting["bounds"](setting["divided"], method)
        right = setting["bounds"](setting["whole"], method)
        outside = torch.maximum((bounds[:, :5] - outputs).amax(), (outputs - bounds[:, 5:]).amax())
        found[name] = {"difference": _difference(bounds, right), "outside": float(outside)}
    distributed.stop()
    return found


def _mistakes() -> dict[str, Any]:
    """Patches that make each of them; the first makes none."""
    from contextlib import nullcontext
    from importlib import import_module
    from unittest.mock import patch

    from service.bounds.linear.propagation import Propagated
    from service.bounds.linear.sharding import RowSharding
    from service.bounds.operators.collectives import CopyToGroup, ReduceFromGroup
    from service.bounds.rank_group import RankGroup

    sweep = import_module("service.bounds.forward").LayerSweep

    def everything_partial(self: RowSharding, biases: Any, name: str, own: bool) -> Any:
        return biases.own if own else biases.partial

    def everything_replicated(self: RowSharding, biases: Any, name: str, own: bool) -> Any:
        return biases.own if own else biases.replicated

    def unsummed(self: Any, node: Any, coefficients: Any, tp_group: RankGroup) -> Propagated:
        return Propagated((coefficients,))

    def unsummed_share(self: Any, node: Any, coefficients: Any, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.own(coefficients, 1),))

    def unrefined(self: Any, node: Any, index: int) -> None:
        """Leave the bounds as intervals have them."""

    def bias_before_the_sum(self: Any, node: Any, inputs: Any, tp_group: RankGroup) -> Any:
        return inputs[0].map(lambda end: tp_group.sum(end) + 0.1)

    return {
        "none": nullcontext(),
        "replicated biases counted once per rank": patch.object(RowSharding, "account", everything_partial),
        "partial biases not summed": patch.object(RowSharding, "account", everything_replicated),
        "no all-reduce at the column-parallel layer": patch.object(CopyToGroup, "backward", unsummed),
        "no reduce-scatter at the column-parallel layer": patch.object(CopyToGroup, "backward_divided", unsummed_share),
        "intervals in place of intermediate bounds": patch.object(sweep, "refine", unrefined),
        "a bias in every rank's summand": patch.object(ReduceFromGroup, "interval", bias_before_the_sum),
    }


@pytest.mark.slow
def test_every_usual_mistake_would_show(torchrun: Any) -> None:
    for found in torchrun(break_it, 2):
        right = found.pop("none")
        assert right["difference"] < 1e-10
        assert right["outside"] < 1e-12, "beyond rounding"
        assert {name: result["difference"] for name, result in found.items() if not result["difference"] > 1e-3} == {}
        for name in ("partial biases not summed", "no reduce-scatter at the column-parallel layer"):
            assert found[name]["outside"] > 1e-6, f"{name} is unsound, and samples show it"


def forget_a_collective() -> str:
    import torch
    from meshes import start_mesh
    from torch import nn

    from service.bounds.graph import UnsupportedModelError
    from service.bounds.network import prepare
    from service.parallel import distributed

    mesh = start_mesh(tp=2)
    torch.manual_seed(mesh.tp.rank)
    try:
        prepare(nn.Linear(3, 3), (3,), mesh.tp)
    except UnsupportedModelError as error:
        return str(error)
    finally:
        distributed.stop()
    return ""


@pytest.mark.slow
def test_a_model_whose_ranks_differ_without_a_collective_is_refused(torchrun: Any) -> None:
    for message in torchrun(forget_a_collective, 2):
        assert "aten.linear.default" in message
        assert "differs between tensor-parallel ranks" in message


def unusual_graphs() -> dict[str, float]:
    """Gathered outputs, activations right behind a scatter, and a region that takes up values of an earlier one."""
    import torch
    from divided_tensors import copy_parts
    from meshes import start_mesh
    from nets import box_around, output_bounds, redraw
    from torch import Tensor, nn

    from service.bounds.network import prepare
    from service.parallel import distributed
    from service.parallel.collectives import scatter_to_group
    from service.parallel.mesh import SINGLE, Axis
    from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear

    class Unusual(nn.Module):
        def __init__(self, axis: Axis) -> None:
            super().__init__()
            self.axis = axis
            self.gathered = ColumnParallelLinear(6, 8, axis, gather_output=True)
            self.first, self.second = (RowParallelLinear(8, 6, axis) for _ in range(2))
            self.column, self.later = (ColumnParallelLinear(6, 8, axis) for _ in range(2))
            self.last = RowParallelLinear(8, 3, axis)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.gathered(x))
            x = torch.tanh(scatter_to_group(x, -1, self.axis.group, self.axis.size))
            early = torch.relu(self.column(self.first(x)))
            return self.last(torch.relu(0.5 * early + self.later(torch.relu(self.second(early)))))

    axis = start_mesh(tp=2).tp
    whole, divided = Unusual(SINGLE).double(), Unusual(axis).double()
    generator = torch.Generator().manual_seed(5)
    redraw(whole, generator, scale=2)
    copy_parts(whole, divided, axis)
    box = box_around(torch.randn(5, 6, generator=generator, dtype=torch.float64), 0.3)
    networks = prepare(divided, (6,), axis), prepare(whole, (6,))
    found = {}
    for method in PLAIN:
        bounds = [output_bounds(network, box, method) for network in networks]
        found[method] = max(
            _difference(bounds[0].lower, bounds[1].lower), _difference(bounds[0].upper, bounds[1].upper)
        )
    found["slack"] = float((whole(box.centre) - bounds[0].lower).min())
    distributed.stop()
    return found


@pytest.mark.slow
def test_every_collective_keeps_the_bounds(torchrun: Any) -> None:
    for found in torchrun(unusual_graphs, 2):
        assert found.pop("slack") >= 0
        assert {name: difference for name, difference in found.items() if not difference <= 1e-10} == {}
