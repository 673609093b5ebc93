"""Modules that Dynamo would skip are compiled where they stand, each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config

from service.models.compiled import apply_compile


@pytest.mark.parametrize("unit", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Tanh())])
def test_a_bare_module_of_torch_is_compiled_with_its_hooks(unit: nn.Module) -> None:
    graphs: list[fx.GraphModule] = []
    unit.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    x = torch.randn(2, 4)
    expected = unit(x)
    names = list(unit.state_dict())

    def seen(graph: fx.GraphModule, _inputs: list[Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    apply_compile(unit, seen)
    assert torch.equal(unit(x), expected)
    assert len(graphs) == 1
    assert list(unit.state_dict()) == names


@pytest.mark.slow
def test_modules_of_one_class_do_not_use_up_each_others_limit() -> None:
    units = [nn.Linear(size, 2) for size in range(2, 5 + config.recompile_limit)]
    with config.patch(fail_on_recompile_limit_hit=True):
        for unit in units:
            apply_compile(unit, "eager")
            unit(torch.ones(3, unit.in_features))
