"""The collectives as operators: schemas, fake kernels and traces, with no process group but a group of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import default_partition
from lanes import first_fast, slow_but_for
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils._pytree import tree_leaves

from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import FamilyConfig, build
from service.parallel import collectives, mesh

TRANSFORMER = TransformerConfig(vocab_size=32, dim=16, layers=1, heads=4, kv_heads=2, max_sequence=12)
MLP = MlpConfig(in_features=6, hidden=(8, 8), out_features=3)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (torch.ops.trivet.copy_to_group.default, ()),
        (torch.ops.trivet.reduce_from_group.default, ()),
        (torch.ops.trivet.gather_from_group.default, (1, 1)),
        (torch.ops.trivet.scatter_to_group.default, (-1, 1)),
        (torch.ops.trivet.reduce_scatter_to_group.default, (0, 1)),
        (torch.ops.trivet.gather_with_reduce_from_group.default, (-2, 1)),
    ],
)
def test_operators_are_well_formed(operator: Any, arguments: tuple[int, ...], group: str) -> None:
    for x in (torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, dtype=torch.float64).T.requires_grad_()):
        call = (x, *arguments[:1], group, *arguments[1:])
        # A group of one leaves values alone, so the gradient can be checked by differences too.
        torch.library.opcheck(operator, call)
        if x.dtype == torch.float64:
            assert torch.autograd.gradcheck(operator, call)
            assert torch.autograd.gradgradcheck(operator, call)


def test_the_maximum_is_well_formed_and_has_no_gradient(group: str) -> None:
    torch.library.opcheck(torch.ops.trivet.max_over_group.default, (torch.randn(3), group))
    with pytest.raises(RuntimeError):
        collectives.max_over_group(torch.randn(3, requires_grad=True), group).sum().backward()


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: collectives.gather_from_group(x, -1, "nobody", 4), (2, 32)),
        (lambda x: collectives.gather_with_reduce_from_group(x, 0, "nobody", 4), (8, 8)),
        (lambda x: collectives.scatter_to_group(x, 1, "nobody", 4), (2, 2)),
        (lambda x: collectives.reduce_scatter_to_group(x, -1, "nobody", 4), (2, 2)),
        (lambda x: collectives.max_over_group(x, "nobody"), (2, 8)),
    ],
)
def test_shapes_are_known_without_a_group(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    assert function(torch.empty(2, 8, device="meta")).shape == shape


def test_without_a_group_nothing_happens() -> None:
    x = torch.randn(2, 8)
    for function in (collectives.copy_to_group, collectives.reduce_from_group, collectives.max_over_group):
        assert function(x, "") is x
    for sized in (
        collectives.gather_from_group,
        collectives.scatter_to_group,
        collectives.reduce_scatter_to_group,
        collectives.gather_with_reduce_from_group,
    ):
        assert sized(x, 1, "", 1) is x


def test_a_planned_group_cannot_run() -> None:
    with pytest.raises(collectives.GroupError, match=r"no process group 'planned/tp'.*only planned"):
        collectives.reduce_from_group(torch.randn(2), "planned/tp")


@dataclass(frozen=True)
class Traced:
    """A rank of two that is only planned, and how often each collective runs forward."""

    config: FamilyConfig
    x: Tensor
    forward: dict[str, int]

    def planned(self, rank: int) -> nn.Module:
        assert not dist.is_initialized()
        return build(self.config, mesh.plan(ParallelSpec(tp=2), rank))


DIVIDED = {
    # Three norms; two layers and the head are entered; the embedding and two layers are left.
    "by tokens": Traced(
        TRANSFORMER,
        torch.zeros(3, 8, dtype=torch.int64),
        {"copy_to_group": 3, "gather_with_reduce_from_group": 3, "reduce_scatter_to_group": 3},
    ),
    "an odd sequence": Traced(
        TRANSFORMER, torch.zeros(3, 7, dtype=torch.int64), {"copy_to_group": 3, "reduce_from_group": 3}
    ),
    # The head takes whole features and slices them.
    "mlp": Traced(MLP, torch.zeros(3, 6), {"copy_to_group": 1, "reduce_from_group": 2, "scatter_to_group": 1}),
}
ADJOINT = {
    "copy_to_group": "reduce_from_group",
    "gather_with_reduce_from_group": "reduce_scatter_to_group",
    "reduce_scatter_to_group": "gather_with_reduce_from_group",
    "scatter_to_group": "gather_from_group",
}


def collectives_of(graph: torch.fx.Graph) -> dict[str, int]:
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return dict(Counter(name.split(".")[1] for name in names if name.startswith("trivet.")))


def assert_no_group(module: torch.fx.GraphModule) -> None:
    """Nothing in the graph is or asks for a process group; groups are strings."""
    for node in module.graph.nodes:
        assert "process_group" not in str(node.target).lower()
        assert not [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, dist.ProcessGroup)]
        if str(node.target).startswith("trivet."):
            assert "planned/tp" in node.args
        if node.op == "get_attr":
            value = attrgetter(node.target)(module)
            assert isinstance(value, Tensor | nn.Module), node.target


@pytest.mark.parametrize(
    ("name", "rank"), slow_but_for([("by tokens", 1), ("an odd sequence", 0), ("mlp", 1)], ("by tokens", 1))
)
def test_a_divided_model_is_exported_without_a_group(name: str, rank: int) -> None:
    traced = DIVIDED[name]
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(traced.planned(rank), (traced.x,), dynamic_shapes=batch).run_decompositions()
    assert collectives_of(program.graph) == traced.forward
    assert_no_group(program.graph_module)
    assert all(isinstance(value, Tensor) for value in program.constants.values())
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [target for target in called if "attention" in target]


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(1, DIVIDED))
def test_a_divided_model_is_traced_forward_and_backward_as_one_graph_without_a_group(name: str) -> None:
    """``aot_eager`` with an ear on the joint graph."""
    traced = DIVIDED[name]
    joints: list[torch.fx.GraphModule] = []

    def partition(joint: torch.fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        joints.append(joint)
        return default_partition(joint, *arguments, **options)

    x = traced.x.clone().requires_grad_(traced.x.is_floating_point())
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)
    with pytest.raises(collectives.GroupError):  # traced whole; only then does the first collective run
        torch.compile(traced.planned(0), fullgraph=True, backend=backend)(x)
    assert len(joints) == 1
    assert_no_group(joints[0])
    backward = Counter({ADJOINT[each]: count for each, count in traced.forward.items() if each in ADJOINT})
    found = Counter(collectives_of(joints[0].graph))
    assert found == Counter(traced.forward) + backward, (found, traced.forward)


def test_the_explicit_and_the_fused_attention_agree() -> None:
    model = build(TRANSFORMER, dtype=torch.float64)
    tokens = torch.arange(20).reshape(2, 10) % 32
    exported = torch.export.export(model, (tokens,)).module()
    torch.testing.assert_close(exported(tokens), model(tokens), rtol=1e-12, atol=1e-12)
