"""Modules that Dynamo would skip are compiled where they stand, each by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config

from service.models.compiled import apply_compile, load_portable


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


def test_a_kernel_of_another_job_is_tuned_although_the_folder_of_its_note_is_gone() -> None:
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    def refuse(name: str, note: object) -> None:
        raise OSError(f"there is no folder for {name}")

    gone: Any = SimpleNamespace(put=refuse)
    noted = AutotuneCache("", local_cache=(gone, "kernel.best_config"))
    tuned: Any = SimpleNamespace(kwargs={}, num_warps=4, num_stages=1)
    with pytest.MonkeyPatch.context() as patch:
        # As torch has it: another test of this process may have loaded code before.
        patch.setattr(AutotuneCache, "save", getattr(AutotuneCache.save, "__wrapped__", AutotuneCache.save))
        with pytest.raises(OSError, match="no folder"):
            noted.save(tuned, 1)
        assert not load_portable(b"damaged")
        noted.save(tuned, 1)
