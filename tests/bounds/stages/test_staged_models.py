"""Transformers, images, residual graphs and deep networks over pipeline stages: bounds are those of one process."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import Gated, Residual
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.graph import INPUT, Graph, Node, Ref, UnsupportedModelError
from service.bounds.graph_module import ExecutableGraph
from service.bounds.placement import place
from service.bounds.stages.cuts import SLACK, cut_graph, held

CLOSE = {"float32": 2e-5, "float64": 1e-10}


class Tangled(nn.Module):
    """Values that several later layers read, so that a cut has to let several of them through."""

    def __init__(self, width: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        older, old = x, torch.tanh(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            older, old = old, torch.relu(layer(old)) + older * 0.5
        return old * older


def graphs() -> dict[str, tuple[nn.Module, int]]:
    torch.manual_seed(3)
    made: dict[str, tuple[nn.Module, int]] = {
        "tangled": (Tangled(), 6),
        "residual": (nn.Sequential(*(Residual(5, nn.ReLU()) for _ in range(4)), nn.Linear(5, 3)), 5),
        "gated": (Gated(), 6),
        "images": (
            nn.Sequential(
                nn.Unflatten(1, (2, 6, 6)), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(),
                nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 7), nn.Sigmoid(), nn.Linear(7, 3),
            ),
            72,
        ),
    }  # fmt: skip
    return {name: (module.double().eval(), features) for name, (module, features) in made.items()}


@cache
def captured(name: str) -> Graph:
    module, features = graphs()[name]
    return capture(module, (features,))


@pytest.mark.parametrize("name", ["tangled", "residual", "gated", "images"])
def test_stages_one_after_the_other_are_the_model(name: str) -> None:
    (module, features), graph = graphs()[name], captured(name)
    x = torch.randn(4, features, dtype=torch.float64)
    for stages in (2, 3, 4):
        between = there = x.clone().requires_grad_()
        for part in cut_graph(graph, place(graph), stages):
            between = ExecutableGraph(part)(between)
        own = x.clone().requires_grad_()
        expected = module(own)
        torch.testing.assert_close(between, expected)
        ends = (between, there), (expected, own)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y, x in ends))


def test_a_graph_evaluates_in_the_type_of_its_constants() -> None:
    module, features = graphs()["images"]
    evaluated = ExecutableGraph(capture(module, (features,))).float()
    assert evaluated(torch.zeros(2, features)).dtype == torch.float32


def chain(widths: list[int]) -> Graph:
    """Linear layers one after the other."""
    nodes = [Node("x", INPUT, {}, (widths[0],))]
    for index, (before, after) in enumerate(pairwise(widths)):
        layer = {"input": Ref(nodes[-1].name), "weight": torch.zeros(after, before), "bias": torch.zeros(after)}
        nodes.append(Node(f"layer_{index}", "aten.linear.default", layer, (after,), ((before,),)))
    return Graph(tuple(nodes))


@given(st.lists(st.integers(1, 60), min_size=5, max_size=9), st.integers(2, 4))
def test_no_stage_holds_much_more_than_it_must(widths: list[int], stages: int) -> None:
    graph = chain(widths)
    largest = max(sum(held(node) for node in part.nodes[1:]) for part in cut_graph(graph, place(graph), stages))
    sizes = [held(node) for node in graph.nodes[1:]]
    # Of any chain: filled one after the other up to the mean, no stage has more than that and one layer.
    assert largest <= SLACK * (sum(sizes) / stages + max(sizes)) + held(graph.nodes[0])
    assert largest >= max(sizes)


def test_too_many_stages_are_refused() -> None:
    graph = chain([3, 4, 5, 2])
    with pytest.raises(
        UnsupportedModelError, match=r"parallel\.pp: 4 stages, .* 2 places for a cut; expected at most 3"
    ):
        cut_graph(graph, place(graph), 4)


def compare() -> dict[str, dict[str, float]]:
    """Differences to one process, relative to the largest bound, by model, mesh and method."""
    from service.bounds.stages import StageLink
    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    device = distributed.start("cpu")
    found: dict[str, dict[str, float]] = {}
    for degrees in ({"pp": 4}, {"pp": 2, "tp": 2}):
        mesh = build_mesh(ParallelSpec.model_validate(degrees), "cpu")
        line = StageLink(mesh, device)
        names = ["tangled", "images"] if "tp" in degrees else list(graphs())
        found |= {f"{name} on {degrees}": case for name, case in _of_graphs(mesh, line, names).items()}
        if "tp" in degrees:
            # Each of two ranks has two of four tokens. To capture layers takes long: stages in the middle are shown by
            # the graphs, and values that both ranks have whole by test_stage_bounds and test_transformer_bounds.
            found[f"transformer on {degrees}"] = _of_transformer(mesh, line, 4)
        else:
            found["convnet"] = _of_convnet(mesh, line)
            for dtype in (torch.float32, torch.float64):
                found[f"deep {str(dtype).removeprefix('torch.')}"] = _of_deep(mesh, line, dtype)
    distributed.stop()
    return found


def _of_graphs(mesh: Any, line: Any, names: list[str]) -> dict[str, dict[str, float]]:
    from service.bounds.network import from_graph
    from service.bounds.shard import shard
    from service.bounds.stages import divide_into_stages

    found = {}
    for name in names:
        graph = captured(name)
        staged = divide_into_stages(shard(graph, mesh.tp), mesh.tp, line)
        x = torch.randn(2, *graph.input.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found[name] = _differences(staged, lambda g=graph: from_graph(g), x, 0.1)
    return found


def _of_transformer(mesh: Any, line: Any, sequence: int) -> dict[str, float]:
    from nets import tokens, transformer

    from service.bounds.network import prepare
    from service.bounds.stages import InStages, prepare_stages
    from service.models.transformer import AfterEmbedding, embedded

    whole = transformer(heads=2, layers=mesh.pp.size)
    rest = AfterEmbedding(transformer(mesh, heads=2, layers=mesh.pp.size), sequence)
    x = embedded(whole, tokens(sequence))
    staged = prepare_stages(rest, (sequence, 8), mesh.tp, line)
    model = InStages(rest, line)(x)
    found = _differences(staged, lambda: prepare(AfterEmbedding(whole, sequence), (sequence, 8)), x, 1e-4)
    return {**found, "model": float((model - whole(tokens(sequence))[:, -1]).abs().max())}


def _of_convnet(mesh: Any, line: Any) -> dict[str, float]:
    from service.bounds.network import prepare
    from service.bounds.stages import prepare_stages
    from service.jobs.spec.families import ConvnetConfig
    from service.models import build

    config = ConvnetConfig(in_channels=2, height=6, width=6, channels=(4, 3), hidden=(9, 7), out_features=3)
    staged = prepare_stages(build(config, mesh, dtype=torch.float64, seed=3), (72,), mesh.tp, line)
    x = torch.randn(2, 72, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return _differences(staged, lambda: prepare(build(config, dtype=torch.float64, seed=3), (72,)), x, 0.1)


def _of_deep(mesh: Any, line: Any, dtype: torch.dtype) -> dict[str, float]:
    """As deep and wide as the networks of mnist_fc."""
    from service.bounds.network import prepare
    from service.bounds.stages import prepare_stages
    from service.jobs.spec.model import MlpConfig
    from service.models import build

    config = MlpConfig(in_features=784, hidden=(256,) * 4, out_features=10)

    def scaled(mesh: Any) -> nn.Module:
        module = build(config, mesh, dtype=dtype, seed=3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2.2)
        return module

    staged = prepare_stages(scaled(mesh), (784,), mesh.tp, line)
    x = torch.rand(1, 784, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return _differences(staged, lambda: prepare(scaled(None), (784,)), x, 0.02, ("crown-ibp", "crown", "alpha-crown"))


FIXED = "alpha-crown (fixed intermediate bounds)"


def is_last_rank(staged: Any) -> bool:
    axis = staged.network.tp_group.axis
    return bool(staged.line.is_last) and axis.rank == axis.size - 1


def _differences(
    staged: Any, whole: Callable[[], Any], x: Tensor, eps: float, methods: tuple[str, ...] = ("crown", FIXED)
) -> dict[str, float]:
    """On the last rank, which alone makes the network whole; elsewhere sums, which all ranks have in common."""
    from nets import box_around
    from stage_differences import compare_bounds

    from service.bounds.methods import BoundOptions
    from service.bounds.optimise import Ascent

    network = whole() if is_last_rank(staged) else None
    return compare_bounds(staged, network, box_around(x, eps), BoundOptions(ascent=Ascent(iterations=3)), methods)


@pytest.mark.slow(30)
@pytest.mark.distributed
def test_stages_find_the_bounds_of_one_process(torchrun: Any) -> None:
    results = torchrun(compare, 4)
    for name in results[3]:
        for result in results:
            differences = {case: value for case, value in result[name].items() if " of " not in case}
            close = CLOSE["float32"] if "float32" in name else CLOSE["float64"]
            assert all(value <= close for value in differences.values()), (name, differences)
            for case, value in result[name].items():
                if case.startswith("sum of"):
                    assert value == pytest.approx(results[3][name][case], rel=1e-12), (name, case)
    deep = results[3]["deep float64"]
    assert deep["width of crown-ibp"] > 10 * deep["width of crown"] > 10.1 * deep["width of alpha-crown"]
    assert len(results[3]) == 10


def real(folder: str) -> dict[str, dict[str, float]]:
    from service.bounds.network import from_graph
    from service.bounds.onnx import load
    from service.bounds.stages import StageLink, divide_into_stages
    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    device = distributed.start("cpu")
    mesh = build_mesh(ParallelSpec(pp=2), "cpu")
    line, found = StageLink(mesh, device), {}
    (file,) = Path(folder).rglob("*256x6.onnx*")
    module = load(gzip.decompress(file.read_bytes()))
    for dtype in (torch.float32, torch.float64):
        graph = capture(module.to(dtype), (784,))
        x = torch.rand(1, 784, generator=torch.Generator().manual_seed(0), dtype=dtype)
        staged, name = divide_into_stages(graph, mesh.tp, line), str(dtype).removeprefix("torch.")
        found[name] = _differences(staged, lambda g=graph: from_graph(g), x, 0.02, ("crown", FIXED))
    distributed.stop()
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_real_deep_network_has_the_bounds_of_one_process(torchrun: Any, parity: Path) -> None:
    """mnist_fc 256x6, where interval bounds in place of intermediate ones would be off by hundreds."""
    folder = parity.parent / "vnncomp" / "mnist_fc"
    if not folder.is_dir():
        pytest.skip("the networks of mnist_fc are not on this machine; they are not part of the repository")
    found = torchrun(real, 2, folder=str(folder))[1]
    assert found.keys() == CLOSE.keys()
    for name, case in found.items():
        for method in ("crown", FIXED):
            assert case[method] <= CLOSE[name], (name, method)
