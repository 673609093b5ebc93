"""Gradients of many micro-batches, added up before ranks exchange them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from service.jobs.spec.common import ParallelSpec
from service.parallel import distributed
from service.parallel import mesh as meshes
from service.parallel.fsdp import PartlyUsed, Precision, apply_fsdp, synchronize_gradients
from service.training.gradients import TiedStages

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("param", [None, BF16])
def test_as_many_micro_batches_as_bf16_cannot_count(param: torch.dtype | None, group: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    apply_fsdp(model, meshes.build(ParallelSpec(), "cpu"), Precision(param, BF16))
    for index in range(300):
        synchronize_gradients(model, index == 299)
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.sum().item() == 300  # 256 + 1 is 256 in bf16


class OneAfterTheOther(nn.Module):
    """Two layers, of which each forward uses the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        self.called = 0

    def forward(self, x: Tensor) -> Tensor:
        self.called += 1
        output: Tensor = self.layers[self.called % 2](x)
        return output


def test_parameters_of_different_micro_batches_are_reduced_together(group: str) -> None:
    model = OneAfterTheOther()
    apply_fsdp(model, meshes.build(ParallelSpec(), "cpu"), Precision(BF16, FP32))
    used = PartlyUsed(model, group)
    for index in range(2):
        synchronize_gradients(model, index == 1)
        model(torch.ones(1, 1)).sum().backward()
    used.settle()
    assert [each.grad is not None and each.grad.sum().item() for each in model.parameters()] == [1, 1]


def test_a_module_of_two_blocks_is_refused(group: str) -> None:
    model, shared = nn.Module(), nn.Linear(1, 1)
    model.blocks = nn.ModuleDict({"0": nn.Sequential(shared), "1": nn.Sequential(shared)})
    with pytest.raises(ValueError, match=r"'blocks\.0\.0\.weight' and 'blocks\.1\.0\.weight' are one"):
        apply_fsdp(model, meshes.build(ParallelSpec(), "cpu"))


def test_a_gradient_of_one_of_two_tied_parameters_is_that_of_both() -> None:
    original, copy = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    original.grad = torch.ones(2)
    TiedStages((original,), (copy,)).sum_gradients()
    assert copy.grad is not None
    assert copy.grad.tolist() == original.grad.tolist() == [1, 1]


def one_of_two() -> list[Any]:
    """On two ranks: only the second has a gradient of the first parameter, and none has one of the second."""
    distributed.start("cpu")
    pair, rank = (nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))), dist.get_rank()
    if rank:
        pair[0].grad = torch.ones(1)
    TiedStages(
        (pair, ())[rank], ((), pair)[rank], group=meshes.build(ParallelSpec(pp=2), "cpu").pp.group
    ).sum_gradients()
    distributed.stop()
    return [None if each.grad is None else each.grad.tolist() for each in pair]


@pytest.mark.distributed
def test_tied_parameters_that_one_stage_leaves_out_take_part_with_zeros(torchrun: Any) -> None:
    assert torchrun(one_of_two, 2) == [[[1], None], [[1], None]]
