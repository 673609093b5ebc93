"""The collectives as operators: schemas, fake kernels and traces, with no process group but a group of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import default_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from service.jobs.spec.base import ParallelSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import FamilyConfig, build
from service.parallel import collectives, mesh

TRANSFORMER = TransformerConfig(vocab_size=32, dim=16, layers=1, heads=4, kv_heads=2, max_sequence=12)
MLP = MlpConfig(in_features=6, hidden=(8, 8), out_features=3)


def exported_collectives(model: nn.Module, x: Tensor) -> list[str]:
    program = torch.export.export(model, (x,))
    return [str(node.target) for node in program.graph.nodes if "trivet" in str(node.target)]


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    """The name of a real group that this process is alone in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


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


@pytest.mark.parametrize(
    ("config", "x"), [(TRANSFORMER, torch.zeros(3, 8, dtype=torch.int64)), (MLP, torch.zeros(3, 6))]
)
def test_a_divided_model_is_exported_without_a_group(config: FamilyConfig, x: Tensor) -> None:
    planned = build(config, mesh.plan(ParallelSpec(tp=2), rank=1))
    program = torch.export.export(planned, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    targets = [str(node.target) for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    collective = {target for target in targets if "trivet" in target}
    assert {"trivet.copy_to_group.default", "trivet.reduce_from_group.default"} <= collective
    assert not [target for target in targets if "attention" in target or "process_group" in target.lower()]


@pytest.mark.parametrize(
    ("config", "x"), [(TRANSFORMER, torch.zeros(3, 8, dtype=torch.int64)), (MLP, torch.zeros(3, 6))]
)
def test_a_divided_model_is_traced_forward_and_backward_as_one_graph_without_a_group(
    config: FamilyConfig, x: Tensor
) -> None:
    joints: list[list[str]] = []

    def partition(joint: torch.fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        joints.append([str(node.target) for node in joint.graph.nodes if "trivet" in str(node.target)])
        return default_partition(joint, *arguments, **options)

    planned = build(config, mesh.plan(ParallelSpec(tp=2)))
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition)
    with pytest.raises(collectives.GroupError):  # traced whole; only then does the first collective run
        torch.compile(planned, fullgraph=True, backend=backend)(x.requires_grad_(x.is_floating_point()))
    assert len(joints) == 1
    reductions = joints[0].count("trivet.reduce_from_group.default")
    assert reductions > sum("reduce_from_group" in name for name in exported_collectives(planned, x))


def test_the_explicit_and_the_fused_attention_agree() -> None:
    model = build(TRANSFORMER, dtype=torch.float64)
    tokens = torch.arange(20).reshape(2, 10) % 32
    exported = torch.export.export(model, (tokens,)).module()
    torch.testing.assert_close(exported(tokens), model(tokens), rtol=1e-12, atol=1e-12)
