"""Models that others divided, by DTensors or by torch's own collectives, have the bounds of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as of_nn
from lanes import first_fast
from nets import box_around, output_bounds, redraw
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from service.bounds.capture import capture
from service.bounds.dtensors import _StandIn
from service.bounds.graph import UnsupportedModelError
from service.bounds.methods import BoundOptions
from service.bounds.network import prepare
from service.bounds.optimise import Ascent
from service.jobs.spec.common import ParallelSpec
from service.models.plain import check_planned
from service.parallel import distributed
from service.parallel.mesh import build as build_mesh

METHODS = ["ibp", "crown-ibp", "crown", "alpha-crown"]
OPTIONS = BoundOptions(ascent=Ascent(iterations=5))
TOKENS, WIDTH = 2, 6


class Whole(nn.Module):
    """Two residual blocks over tokens, with a norm between, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.out, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x + self.down(torch.relu(self.up(x))))
        x = self.norm(x)
        return self.head(x + self.out(torch.tanh(self.gate(x))))


class WithDTensors(Whole):
    """The same, with DTensors between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        mesh = self.head.weight.device_mesh
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        x = torch.relu(x + self.down(torch.relu(self.up(x))))
        x = self.norm(x.redistribute(placements=[Shard(1)]))
        x = x.redistribute(placements=[Replicate()])
        return self.head(x + self.out(torch.tanh(self.gate(x)))).full_tensor()


BLOCKS: dict[str, ParallelStyle] = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "gate": ColwiseParallel(),
    "out": RowwiseParallel(),
}
BY_TOKENS: dict[str, ParallelStyle] = {
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "gate": ColwiseParallel(input_layouts=Shard(1)),
    "out": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
"""The residual stream is divided by tokens."""


def by_tokens(whole: Whole, mesh: DeviceMesh) -> nn.Module:
    """What enters is divided before the first layer: both addends are a rank's own tokens."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parallelize_module(whole, mesh, BY_TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.chunk(2, dim=1)[dist.get_rank()])  # type: ignore[no-any-return]

    return Divided()


def with_dtensors(whole: Whole, mesh: DeviceMesh) -> nn.Module:
    whole.__class__ = WithDTensors
    plan = {name: type(style)(use_local_output=False) for name, style in BLOCKS.items()}
    whole = parallelize_module(whole, mesh, {**plan, "norm": SequenceParallel(use_local_output=False)})
    for name, parameter in whole.head.named_parameters():
        setattr(whole.head, name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
    return whole


class ByHand(nn.Module):
    """The whole function with collectives of ``torch.distributed.nn``, or with those that write in place."""

    def __init__(self, whole: Whole, calls: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.norm, self.head, self.calls, self.rank = whole.norm, whole.head, calls, dist.get_rank()
        for first, second in (("up", "down"), ("gate", "out")):
            for name, dimension in ((first, 0), (second, 1)):
                part = getattr(whole, name).weight.chunk(2, dimension)[self.rank]
                self.register_buffer(f"{name}_weight", part)
            self.register_buffer(f"{first}_bias", getattr(whole, first).bias.chunk(2)[self.rank])
            self.register_buffer(f"{second}_bias", getattr(whole, second).bias)

    def forward(self, x: Tensor) -> Tensor:
        up = torch.relu(nn.functional.linear(x, self.up_weight, self.up_bias))
        x = torch.relu(x + self.calls["total"](up @ self.down_weight.T) + self.down_bias)
        token = x[:, self.rank]  # each rank has one token
        x = torch.stack(self.calls["gathered"](self.norm(token)), 1)
        gate = self.calls["gathered"](torch.tanh(nn.functional.linear(x, self.gate_weight, self.gate_bias)))[self.rank]
        out = gate @ self.out_weight.T
        own = self.calls["scattered"]([out[:, 0], out[:, 1]])  # the own token's sum
        there = self.calls["exchanged"]([own, own])[1 - self.rank]  # the other's
        tokens = [own, there] if self.rank == 0 else [there, own]
        y = self.head(x + torch.stack(tokens, 1) + self.out_bias)
        return self.calls["sent"](y)  # type: ignore[no-any-return]


def in_place() -> Iterator[tuple[str, Callable[..., Any]]]:
    def total(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    def gathered(x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(found, x.contiguous())
        return found

    def scattered(parts: list[Tensor]) -> Tensor:
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, [each.contiguous() for each in parts])
        return own

    def exchanged(parts: list[Tensor]) -> list[Tensor]:
        found = [torch.empty_like(each) for each in parts]
        dist.all_to_all(found, [each.contiguous() for each in parts])
        return found

    def sent(x: Tensor) -> Tensor:
        x = x.clone()
        dist.broadcast(x, src=1)
        return x

    yield from {"total": total, "gathered": gathered, "scattered": scattered, "sent": sent}.items()
    yield "exchanged", exchanged


OF_NN: dict[str, Callable[..., Any]] = {
    "total": of_nn.all_reduce,
    "gathered": lambda x: of_nn.all_gather(x.contiguous()),
    "scattered": lambda parts: of_nn.reduce_scatter(torch.empty_like(parts[0]), [x.contiguous() for x in parts]),
    "exchanged": lambda parts: of_nn.all_to_all(list(map(torch.empty_like, parts)), [x.contiguous() for x in parts]),
    "sent": lambda x: of_nn.broadcast(x.contiguous(), 1),
}
DIVIDED: dict[str, Callable[[Whole, DeviceMesh], nn.Module]] = {
    "layers": lambda whole, mesh: parallelize_module(whole, mesh, BLOCKS),
    "layers by tokens": by_tokens,
    "DTensors": with_dtensors,
    "torch.distributed.nn": lambda whole, mesh: ByHand(whole, OF_NN),
    "in place": lambda whole, mesh: ByHand(whole, dict(in_place())),
}


def bound(names: list[str], kind: str = "cpu") -> dict[str, dict[str, float]]:
    """Return by model and method how far bounds are from those of one process, in units of the largest."""
    device = distributed.start(kind)
    axis = build_mesh(ParallelSpec(tp=2), kind).tp
    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("tp",))
    found = {name: _differences(DIVIDED[name], axis, mesh, device) for name in names}
    distributed.stop()
    return found


def _differences(
    divide: Callable[..., nn.Module], axis: Any, mesh: DeviceMesh, device: torch.device
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(3)
    whole, other = Whole().double(), Whole().double()
    redraw(whole, generator, scale=0.7)
    other.load_state_dict(whole.state_dict())
    whole, divided = whole.to(device).requires_grad_(False), divide(other.to(device), mesh).requires_grad_(False)
    box = box_around(torch.randn(3, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(device), 0.05)
    found = {"same": float((whole(box.centre) - divided(box.centre)).abs().max())}
    if axis.rank == 0:  # a trace that asked another rank would wait for ever
        capture(divided, (TOKENS, WIDTH))
    networks = prepare(whole, (TOKENS, WIDTH)), prepare(divided, (TOKENS, WIDTH), axis)
    for method in METHODS:
        one, two = (output_bounds(network, box, method, OPTIONS) for network in networks)
        ends = ((one.lower, two.lower), (one.upper, two.upper))
        found[method] = max(float((a - b).abs().max() / a.abs().max()) for a, b in ends)
    return found


def check(results: list[dict[str, dict[str, float]]]) -> None:
    for found in results:
        assert {name: own for name, own in found.items() if max(own.values()) > 1e-9} == {}


@pytest.mark.distributed
@pytest.mark.parametrize("name", first_fast(1, list(DIVIDED)))
def test_bounds_of_a_model_that_others_divided_are_those_of_one_process(torchrun: Any, name: str) -> None:
    check(torchrun(bound, 2, names=[name]))


@pytest.mark.distributed
@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks over NCCL need 2 GPUs")
def test_bounds_of_models_that_others_divided_are_those_of_one_gpu(fresh_torchrun: Any) -> None:
    check(fresh_torchrun(bound, 2, names=list(DIVIDED), kind="cuda"))


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner(x))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "along the batch": (
        lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD),
        "_functional_collectives.all_to_all_single cannot be bounded: it joins or cuts dimension 0, the instances",
    ),
    "to one rank": (lambda x: dist.reduce(x, 0), "torch.distributed.reduce cannot be bounded: not every rank gets"),
    "a message": (lambda x: dist.send(x, 0), "torch.distributed.send cannot be bounded: messages between two ranks"),
    "objects": (lambda x: dist.broadcast_object_list([1]), "it exchanges objects"),
    "not waited for": (lambda x: dist.all_reduce(x, async_op=True), "async_op=True cannot be bounded; expected False"),
    "the largest": (lambda x: of_nn.all_reduce(x, dist.ReduceOp.MAX), "'max' cannot be bounded; expected 'sum' or"),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank in this process: all that a trace needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", REFUSED)
def test_a_collective_without_a_rule_is_refused_with_what_to_write(mesh: DeviceMesh, name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(UnsupportedModelError) as caught:
        capture(Calling(call).requires_grad_(False), (4,))
    assert said in str(caught.value)
    assert dist.get_backend() == "gloo", "torch's own functions are in place again"
    dist.all_reduce(torch.ones(1))


def placed(x: Tensor, mesh: DeviceMesh, placement: Any) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x, mesh: placed(x, mesh, Shard(1)).softmax(1), r"softmax\(a DTensor .* with S\(1\), int\) cannot be"),
        (lambda x, mesh: placed(x, mesh, Shard(1)), r"the model returns a DTensor .*: let it return full_tensor\(\)"),
        (lambda x, mesh: placed(x, mesh, Replicate()) + x, "use_local_output=True"),
        (
            lambda x, mesh: nn.functional.linear(placed(x, mesh, Shard(1)), placed(torch.ones(4, 4), mesh, Shard(0))),
            r"linear\(a DTensor .* with S\(1\), a DTensor \[4, 4\] with S\(0\)\) cannot be bounded",
        ),
        (
            lambda x, mesh: placed(x, mesh, Replicate()).redistribute(placements=[torch.distributed.tensor.Partial()]),
            "redistribute from R to P",
        ),
        (lambda x, mesh: DTensor.from_local(x), "has no device_mesh"),
        (lambda x, mesh: DTensor.from_local(x, mesh, [Replicate()], run_check=True), "run_check=True asks other ranks"),
    ],
)
def test_what_has_no_rule_for_its_placement_is_refused_by_name(mesh: DeviceMesh, use: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        capture(Calling(lambda x: use(x, mesh)).requires_grad_(False), (4,))


def test_a_family_whose_parameters_are_divided_already_is_refused(mesh: DeviceMesh) -> None:
    model = parallelize_module(Whole(), mesh, BLOCKS)
    with pytest.raises(ValueError, match=r"Whole has a DTensor, 'up.weight'; expected this rank's part"):
        check_planned(model, is_cut=False)


def test_a_mesh_of_two_dimensions_and_parts_of_several_sizes_are_refused(mesh: DeviceMesh) -> None:
    twice = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = Calling(lambda x: DTensor.from_local(x, twice, [Replicate(), Shard(1)], run_check=False).full_tensor())
    with pytest.raises(UnsupportedModelError, match=r"expected a mesh of one dimension, such as mesh\['tp'\]"):
        capture(model.requires_grad_(False), (4,))
    uneven = _StandIn(torch.zeros(2, 4), SimpleNamespace(size=lambda: 2), [Shard(1)], torch.Size((2, 7)))
    with pytest.raises(UnsupportedModelError, match="a dimension 1 that divides by 2"):
        uneven.full_tensor()
