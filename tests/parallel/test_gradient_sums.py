"""Gradients of many micro-batches, added up before ranks exchange them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from service.jobs.spec.common import ParallelSpec
from service.parallel import mesh as meshes
from service.parallel.fsdp import PartlyUsed, Precision, apply_fsdp, synchronize_gradients

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
