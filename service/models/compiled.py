"""How a model is compiled: the one recipe, which the compile harness judges and a training job applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def compile_in_place(module: nn.Module, backend: str | Callable[..., Any]) -> tuple[nn.Module, ...]:
    """Compile ``module`` with ``backend`` where it stands; names of parameters do not change.

    A plain module is compiled whole. Under FSDP2 each innermost sharded block is compiled by itself, so that the
    hooks which gather and reshard parameters stay outside the graphs: Dynamo never traces them. Returns the
    modules that were compiled; compilation itself happens at their first calls.
    """
    units = compile_units(module)
    for unit in units:
        unit.compile(backend=backend)
    return units


def compile_units(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that ``compile_in_place`` compiles: the innermost FSDP2 blocks, or ``module`` itself."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    innermost = [part for part in sharded if not _holds_another(part)]
    return tuple(innermost) or (module,)


def _holds_another(part: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) for child in part.modules() if child is not part)
