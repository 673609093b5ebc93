"""A model of which ranks use different parameters, as a training job of it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ladder_runs import quick_plan

pytestmark = pytest.mark.distributed


def climb_with_choices() -> list[Any]:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from service.compilation.ladder import climb
    from service.compilation.program.model import ModelProgram, SampleBatch
    from service.compilation.ranks.group import slowest
    from service.compilation.rungs import LADDER
    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel import mesh as meshes
    from service.parallel.fsdp import Precision, apply_fsdp

    class Chosen(nn.Module):
        """Layers of which the samples of a forward choose one."""

        def __init__(self) -> None:
            super().__init__()
            self.some, self.others, self.leave = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.leave(torch.tanh((self.some if x.mean() > 0 else self.others)(x)))
            return scores

    distributed.start("cpu")
    mesh = meshes.build(ParallelSpec(dp_shard=2), "cpu")

    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(3)
        return apply_fsdp(Chosen().to(dtype), mesh, Precision())

    batch = SampleBatch((torch.full((4, 6), 1.0 - 2 * dist.get_rank()),), torch.zeros(4).long())
    program = ModelProgram(build, (batch,), group=mesh.dp.group)
    (result,) = climb(program, LADDER[:1], ["train"], quick_plan(program, 3, agree=slowest))
    distributed.stop()
    return [result.verdict, [finding.message for finding in result.findings]]


def test_parameters_that_only_one_rank_reaches_get_its_gradient(torchrun: Callable[..., list[Any]]) -> None:
    assert torchrun(climb_with_choices, 2) == [["pass", []], ["pass", []]]
