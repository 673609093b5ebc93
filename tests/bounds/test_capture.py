"""From modules to graphs, and what is refused, by name, before anything is bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.decompositions import table
from service.bounds.graph import BatchSize, Graph, Node, Ref, UnsupportedModelError, refs
from service.bounds.graph_module import ExecutableGraph
from service.bounds.network import prepare
from service.bounds.operators import OPERATORS, check
from service.bounds.placement import Placement, place
from service.parallel.collectives import _copy_to_group, _gather_from_group, _reduce_from_group


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)  # type: ignore[operator]


def traced(function: object) -> Graph:
    graph = capture(Function(function), (4,))
    check(graph)
    return graph


def operators(graph: Graph) -> list[str]:
    return [node.operator for node in graph.nodes]


def test_a_graph_is_typed_nodes_with_shapes_of_one_instance() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (4,))
    assert operators(graph) == ["input", "aten.linear.default", "aten.relu.default", "aten.linear.default"]
    assert [node.shape for node in graph.nodes] == [(4,), (6,), (6,), (2,)]
    assert graph.nodes[3].input_shapes == ((6,),)
    assert graph.nodes[1].constant("weight").shape == (6, 4)
    assert graph.nodes[1].inputs == (graph.input.name,)


def test_constants_are_computed_once() -> None:
    graph = traced(lambda m, x: x @ (m.layer.weight.exp().t() * 2).softmax(0))
    assert operators(graph) == ["input", "aten.matmul.default"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [{"size": 82}, {"scale_factor": 41.0}])
def test_enlarging_repeats_the_entries_that_torch_repeats(sizes: dict[str, float], dtype: torch.dtype) -> None:
    """Which of two neighbours is nearest may be a matter of rounding."""
    module = Function(lambda m, x: nn.functional.interpolate(x[:, None, :2], **sizes).flatten(1)).to(dtype)
    x = torch.tensor([[1.0, 2.0, 0.0, 0.0]], dtype=dtype)
    assert torch.equal(ExecutableGraph(capture(module, (4,)))(x), module(x))


def test_what_does_not_reach_the_output_is_dropped() -> None:
    graph = traced(lambda m, x: (torch.cumsum(x, 1), m.layer(x))[1])
    assert operators(graph) == ["input", "aten.linear.default"]


def test_a_module_keeps_its_mode_and_its_parameters() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU().eval())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = operators(capture(module, (4,)))[1:]
    # Up to torch 2.13, a dropout that drops nothing leaves a copy.
    assert [each for each in found if each != "aten.clone.default"] == ["aten.linear.default", "aten.relu.default"]
    assert [each.training for each in module.modules()] == [True, True, True, False]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_the_batch_size_is_no_constant() -> None:
    graph = traced(lambda m, x: x.view(x.shape[0], 2, 2))
    assert graph.output.arguments["size"] == (BatchSize(), 2, 2)
    assert refs(graph.output.arguments["size"]) == ()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: torch.sign(m.layer(x)), "aten.sign.default (node 'sign'"),
        (lambda m, x: x**x, "aten.pow.Tensor_Tensor"),
        (lambda m, x: torch.where(x > x.flip(1), x, -x), "floating-point type"),
        (lambda m, x: m.layer(x) / torch.zeros(4), "its divisor contains zero"),
        (lambda m, x: nn.functional.linear(m.layer(x), m.layer.weight, x[0]), "the batch must stay dimension 0"),
        (lambda m, x: x[:2], "the batch must stay dimension 0"),
        (lambda m, x: x[1:], "cannot be traced"),
        (lambda m, x: x.t(), "the batch must stay dimension 0"),
        (lambda m, x: x.flip(0), "a flip of the batch"),
        (lambda m, x: x.cumsum(0), "sums over the batch"),
        (lambda m, x: x.amax(0, keepdim=True), "an extreme value over the batch"),
        (lambda m, x: x[[1, 0, 2]], "indices into the batch"),
        (lambda m, x: x - x.mean(0, keepdim=True), "the batch must stay dimension 0"),
        (lambda m, x: x.sum(1) * x.std(), "the batch must stay dimension 0"),
        (lambda m, x: m.layer(x) / x.shape[0], "computes with the size of the batch"),
        (lambda m, x: nn.functional.pad(x.unsqueeze(1), (-1, 2), mode="circular"), "takes entries away"),
        (lambda m, x: m.layer(x).double(), "bounded in one floating-point type"),
        (lambda m, x: nn.functional.softplus(x, beta=-1.0), "beta -1.0"),
        (lambda m, x: m.layer.weight[0].expand(x.shape[0], 4), "must return one tensor"),
        (lambda m, x: (x, m.layer(x)), "must return one tensor"),
        (lambda m, x: m.layer.weight, "must return one tensor"),
        (lambda m, x: x if x.sum() > 0 else -x, "cannot be traced"),
        (lambda m, x: m.layer(x.view(-1, 8)), "cannot be traced"),
    ],
)
def test_what_cannot_be_bounded_is_refused_by_name(function: object, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        traced(function)
    assert message in str(refused.value)


def test_a_refusal_lists_every_problem_and_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        traced(lambda m, x: torch.tan(m.layer(x)) + torch.sign(x))
    text = str(refused.value)
    assert "aten.tan.default" in text
    assert "aten.sign.default" in text
    assert all(operator in text for operator in OPERATORS)


def collective_graph(function: object) -> Graph:
    return traced(function)


def test_collectives_decide_what_is_replicated() -> None:
    graph = traced(lambda m, x: torch.relu(_reduce_from_group(torch.relu(m.layer(_copy_to_group(x, "g"))), "g")))
    placed = [place(graph)[node.name] for node in graph.nodes]
    own, replicated = Placement.OWN, Placement.REPLICATED
    assert placed == [replicated, own, own, own, replicated, replicated]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: _reduce_from_group(m.layer(_copy_to_group(x, "g")) + x, "g"), "needs own inputs"),
        (lambda m, x: _reduce_from_group(m.layer(x), "g"), "needs own inputs"),
        (lambda m, x: _reduce_from_group(_copy_to_group(_copy_to_group(x, "g"), "g"), "g"), "needs replicated inputs"),
        (lambda m, x: m.layer(_copy_to_group(x, "g")), "it must be replicated"),
    ],
)
def test_a_graph_that_mixes_placements_is_refused(function: object, message: str) -> None:
    graph = traced(function)
    with pytest.raises(UnsupportedModelError, match=message):
        place(graph)


def test_a_collective_over_the_batch_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="batch"):
        traced(lambda m, x: _gather_from_group(_copy_to_group(x, "g"), 0, "g", 2))


def test_a_constant_is_asked_for_by_the_name_of_its_argument() -> None:
    node = Node("f", "aten.linear.default", {"input": Ref("x"), "weight": Ref("w"), "bias": None}, (4,))
    assert OPERATORS[node.operator].refusal(node) == "its weight would have to be constant"
    with pytest.raises(TypeError, match="'weight' is Ref"):
        node.constant("weight")


class Draws(nn.Module):
    """Random numbers in evaluation mode, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rrelu":
            return nn.functional.rrelu(x, training=True)
        if self.kind == "attention":
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return x + torch.rand_like(x) if self.kind == "noise" else nn.functional.dropout(x, training=True)


@pytest.mark.parametrize("kind", ["rrelu", "attention", "noise", "dropout"])
def test_what_draws_random_numbers_in_evaluation_mode_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError):
        prepare(Draws(kind), (2, 2))


class Counts(nn.Module):
    """Its second run adds what the first has left behind."""

    count: Tensor

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        if registered:
            self.register_buffer("count", torch.zeros(2))
        else:
            self.count = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + self.count


@pytest.mark.parametrize("registered", [True, False])
def test_a_model_whose_runs_differ_is_refused(registered: bool) -> None:
    module = Counts(registered=registered)
    assert not torch.equal(module(torch.zeros(1, 2)), module(torch.zeros(1, 2)))
    with pytest.raises(UnsupportedModelError, match="each run assigns another tensor to 'count'"):
        prepare(module, (2,))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        Function(lambda m, x: torch.maximum(m.layer(x), x) * 0.5 + 1),
    ],
    ids=["linear", "convolution", "maximum"],
)
def test_what_needs_no_decomposition_gives_the_graph_that_one_gives(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = capture(module, (4,))
    monkeypatch.setattr(table, "_is_final", lambda *_: False)
    written = capture(module, (4,))
    views = {"aten.reshape.default": "aten.view.default"}
    assert [views.get(name, name) for name in operators(at_once)] == operators(written)
    for one, other in zip(at_once.nodes, written.nodes, strict=True):
        assert (one.shape, one.input_shapes) == (other.shape, other.input_shapes)
        assert one.arguments.keys() == other.arguments.keys()
        constants = [
            (one.arguments[name], other.arguments[name]) for name in one.arguments if not one.is_variable(name)
        ]
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else refs(a) or a == b for a, b in constants)
