"""Whole networks divided over ranks: which layers pair, and bounds that are those of one process."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meshes import start_mesh
from nets import Gated, box_around, mlp, output_bounds
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.methods import BoundOptions
from service.bounds.network import Network, from_graph
from service.bounds.operators import OPERATORS
from service.bounds.operators.elementwise import Activation
from service.bounds.shard import regions, shard
from service.parallel.mesh import Axis

RANKS = [2, 4]


def convolutional() -> nn.Module:
    """Pools, normalised channels, a padded number of channels that is flattened into a layer."""
    norm = nn.BatchNorm2d(5).eval()
    norm.running_mean, norm.running_var = torch.linspace(-0.2, 0.2, 5), torch.linspace(0.5, 2, 5)
    return nn.Sequential(
        nn.Unflatten(1, (2, 6, 6)),
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 5, 2),
        norm,
        nn.Sigmoid(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(5, 7),
        nn.LeakyReLU(0.1),
        nn.Linear(7, 4),
    )


def networks() -> dict[str, tuple[nn.Module, int]]:
    torch.manual_seed(0)
    deep = mlp([9, 16, 13, 18, 16, 12, 14, 4], nn.ReLU(), 1, scale=2.0)
    made = {
        "deep": (deep, 9),
        "odd widths": (mlp([5, 7, 11, 6, 3], nn.Tanh(), 2), 5),
        "gated": (Gated(), 6),
        "convolutional": (convolutional(), 72),
        "heads of a split width": (
            nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (4, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
            4,
        ),
    }
    return {name: (module.double().eval(), features) for name, (module, features) in made.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deep", [(1, 1), (1, 1), (1, 1)]),
        ("odd widths", [(1, 1), (1, 1)]),
        ("gated", [(2, 1)]),
        ("convolutional", [(1, 1), (1, 1)]),
        ("heads of a split width", [(1, 1)]),
    ],
)
def test_layers_pair_from_the_input_on(name: str, expected: list[tuple[int, int]]) -> None:
    module, features = networks()[name]
    graph = capture(module, (features,))
    for ranks in RANKS:
        assert [(len(region.columns), len(region.rows)) for region in regions(graph, ranks)] == expected


def test_a_layer_narrower_than_the_ranks_stays_whole() -> None:
    graph = capture(mlp([4, 3, 5, 8, 2], nn.ReLU(), 0), (4,))
    (region,) = regions(graph, 4)
    assert [graph.by_name[name].shape for name in region.columns] == [(5,)]


def test_a_function_without_a_value_at_zero_is_not_padded() -> None:
    class Logarithm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, width), nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.log(self.first(x)))

    assert [len(regions(capture(Logarithm(width), (3,)), 4)) for width in (8, 7)] == [1, 0]


def activations() -> dict[str, Callable[[Tensor], Tensor]]:
    """A function for every operator of torch with an elementwise rule of one input, by the operator's name."""
    aten = torch.ops.aten
    plain = {
        name: getattr(aten, name.split(".")[1])
        for name, rule in OPERATORS.items()
        if isinstance(rule, Activation) and name.startswith("aten.")
    }
    return {
        **{name: lambda x, of=of: of(x) for name, of in plain.items()},
        # Where these are defined, and for finite bounds well inside.
        **{name: lambda x, of=plain[name]: of(x.tanh() + 2) for name in POSITIVE},
        "aten.leaky_relu.default": lambda x: aten.leaky_relu(x, 0.1),
        "aten.pow.Tensor_Scalar": lambda x: aten.pow(x, 2),
        "aten.softplus.default": lambda x: aten.softplus(x, 2.0),
        "aten.elu.default": lambda x: aten.elu(x, 0.7),
    }


PADDED = ("aten.relu.default", "aten.atan.default", "aten.softplus.default", "aten.sqrt.default")
"""Compared with a width that does not divide, too."""
POSITIVE = ("aten.log.default", "aten.sqrt.default", "aten.rsqrt.default", "aten.reciprocal.default")


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.function = nn.Linear(4, width), nn.Linear(width, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.slow
def test_every_elementwise_operator_that_can_be_bounded_can_be_divided() -> None:
    assert {
        "aten.atan.default",
        "aten.elu.default",
        "aten.mish.default",
        "aten.softplus.default",
    } < activations().keys()
    for name, function in activations().items():
        graph = capture(Between(function, 8).double(), (4,))
        assert name in {node.operator for node in graph.nodes}
        assert len(regions(graph, 2)) == 1, name


@pytest.mark.slow
def test_padding_needs_a_function_that_is_finite_at_zero() -> None:
    whole = {name for name, function in activations().items() if not regions(capture(Between(function, 7), (4,)), 2)}
    assert whole == {"aten.log.default", "aten.rsqrt.default", "aten.reciprocal.default"}


class Mixing(nn.Module):
    """Each output of the first layer is divided by their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.softmax(self.first(x), -1))))


def test_a_layer_that_stays_whole_is_told_with_the_operator_behind_it() -> None:
    told: list[str] = []
    shard(capture(Mixing(), (4,)), Axis(2, 0, "planned/tp"), told.append)
    (line,) = told
    assert re.match(
        r"aten\.linear\.default \(node '\w+'.*\) stays whole on each of 2 tensor-parallel ranks: aten\.", line
    )
    assert line.endswith(" cannot be divided over them")
    told.clear()
    shard(capture(Between(torch.relu, 8), (4,)), Axis(2, 0, "planned/tp"), told.append)
    assert told == []


def divided_activations() -> dict[str, Any]:
    """For every activation, on two ranks: how far bounds are from one process's, and what each rank has of it."""
    from service.parallel import distributed

    axis = start_mesh(tp=2).tp
    found: dict[str, Any] = {}
    for name, function in activations().items():
        for width in (8, 7) if name in PADDED else (8,):
            graph = capture(Between(function, width).double(), (4,))
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
            divided = shard(graph, axis)
            alone, together = from_graph(graph), from_graph(divided, axis)
            differences = []
            for method in ("ibp", "crown"):
                right, ours = (output_bounds(each, box_around(x, 0.2), method) for each in (alone, together))
                differences += [_difference(ours.lower, right.lower), _difference(ours.upper, right.upper)]
            weights = [
                value.numel() for node in divided.nodes for key, value in node.arguments.items() if key == "weight"
            ]
            sizes = [node.size for node in divided.nodes if node.operator == name]
            found[f"{name} {width}"] = [max(differences), weights, sizes]
    distributed.stop()
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_every_activation_on_two_ranks_has_the_bounds_of_one_process_and_half_of_its_memory(torchrun: Any) -> None:
    for found in torchrun(divided_activations, 2):
        assert len(found) == len(activations()) + len(PADDED)
        for name, (difference, weights, sizes) in found.items():
            assert difference <= 1e-9, name
            assert weights == [4 * 4, 3 * 4], name
            assert sizes == [4] * len(sizes), name
            assert sizes, name


def _axes() -> dict[int, Any]:
    """Four ranks as two groups of two, and as one of four."""
    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    distributed.start("cpu")
    return {ranks: build_mesh(ParallelSpec(dp_shard=4 // ranks, tp=ranks), "cpu").tp for ranks in RANKS}


CASES = {"ibp": BoundOptions(), "crown": BoundOptions(), "crown of few rows at once": BoundOptions(elements=4000)}
Ends = dict[str, list[Any]]
"""Lower and upper bounds by case."""


def _ends(network: Network, x: Tensor) -> Ends:
    found = {}
    for case, options in CASES.items():
        bounds = output_bounds(network, box_around(x, 0.1), case.split()[0], options)
        found[case] = [bounds.lower.tolist(), bounds.upper.tolist()]
    return found


def _inputs(features: int) -> Tensor:
    return torch.randn(3, features, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def compare(alone: dict[str, Ends]) -> dict[str, dict[str, float]]:
    """Largest differences to one process, by network, ranks and case."""
    from service.parallel import distributed

    axes = _axes()
    found: dict[str, dict[str, float]] = {}
    for name, (module, features) in networks().items():
        graph, x = capture(module, (features,)), _inputs(features)
        for ranks, axis in axes.items():
            divided = from_graph(shard(graph, axis), axis)
            at_a_point = output_bounds(divided, box_around(x, 0.0), "ibp").centre
            case = found[f"{name} on {ranks}"] = {
                "own": float(sum(divided.is_own(node.name) for node in divided.nonlinear)),
                "function": _difference(at_a_point, module(x).detach()),
            }
            for how, ends in _ends(divided, x).items():
                pairs = zip(ends, alone[name][how], strict=True)
                case[how] = max(
                    _difference(*(torch.tensor(each, dtype=torch.float64) for each in pair)) for pair in pairs
                )
    distributed.stop()
    return found


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.distributed
def test_divided_networks_have_the_bounds_of_one_process(torchrun: Any) -> None:
    alone = {}
    for name, (module, features) in networks().items():
        alone[name] = _ends(from_graph(capture(module, (features,))), _inputs(features))
    for result in torchrun(compare, 4, alone=alone):
        assert len(result) == len(RANKS) * len(alone)
        for name, found in result.items():
            assert found.pop("own") > 0, f"{name}: nothing was divided"
            assert {case: difference for case, difference in found.items() if not difference <= 1e-10} == {}, name


CLASSIFIER = "256x6"
"""Where interval bounds in place of intermediate ones are off by 792."""


def digit_boxes(folder: Path, eps: str, count: int) -> tuple[list[int], Tensor, Tensor]:
    """Numbers and ends of the first boxes that are there."""
    numbers, ends = [], []
    for number in range(15):
        file = folder / "vnnlib" / f"prop_{number}_{eps}.vnnlib.gz"
        if file.exists() and len(numbers) < count:
            text = gzip.decompress(file.read_bytes()).decode()
            found = {
                sign: [float(value) for value in re.findall(rf"\({sign} X_\d+ ([-\d.e]+)\)", text)]
                for sign in (">=", "<=")
            }
            numbers.append(number)
            ends.append([found[">="], found["<="]])
    lower, upper = torch.tensor(ends, dtype=torch.float64).unbind(dim=1)
    return numbers, lower, upper


def classify(shared: str) -> dict[str, dict[str, float]]:
    """How far CROWN's margins are from those of one process, and below another verifier's in float64, relatively."""
    from service.bounds.interval import Interval
    from service.bounds.methods import METHODS
    from service.bounds.onnx import load
    from service.parallel import distributed

    axes, folder = _axes(), Path(shared) / "vnncomp" / "mnist_fc"
    peer = np.load(Path(shared) / "parity" / "mnist_fc_bounds_f64.npz")
    numbers, lower, upper = digit_boxes(folder, "0.03", 2)
    found: dict[str, dict[str, float]] = {}
    module = load(gzip.decompress((folder / "onnx" / f"mnist-net_{CLASSIFIER}.onnx.gz").read_bytes()))
    expected = torch.tensor(peer[f"{CLASSIFIER}_0.03_CROWN"])[numbers]
    rows = torch.tensor(peer[f"{CLASSIFIER}_0.03_C"])[numbers]
    for dtype in (torch.float64, torch.float32):
        graph = capture(module.to(dtype), (784,))
        divided = {ranks: from_graph(shard(graph, axis), axis) for ranks, axis in axes.items()}
        box, asked = Interval(lower.to(dtype), upper.to(dtype)), rows.to(dtype)
        alone, *margins = (
            METHODS["crown"](network, box, BoundOptions(intersect=False)).lower_bounds(asked).double()
            for network in (from_graph(graph), *divided.values())
        )
        for (ranks, network), margin in zip(divided.items(), margins, strict=True):
            found[f"on {ranks} in {dtype}"] = {
                "own": float(sum(network.is_own(node.name) for node in network.nonlinear)),
                "whole": _difference(margin, alone),
                "looser": float((expected - margin).max() / expected.abs().max()),
            }
    distributed.stop()
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_deep_classifiers_have_the_bounds_of_one_process(torchrun: Any, parity: Path) -> None:
    for result in torchrun(classify, 4, shared=str(parity.parent)):
        for name, found in result.items():
            precise = name.endswith("float64")
            assert found["own"] >= 2, name
            assert found["whole"] <= (1e-10 if precise else 2e-5), name
            assert found["looser"] <= (1e-6 if precise else 2e-5), name
