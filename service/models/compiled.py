"""How a model is compiled: the one recipe, which the compile harness judges and a training job applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def compile_in_place(module: nn.Module, backend: str | Callable[..., Any]) -> tuple[nn.Module, ...]:
    """Compile ``module`` with ``backend`` where it stands; names of parameters do not change.

    What is compiled is compiled as one graph, or it is an error; the first calls do it. Returns the modules.
    """
    units = compile_units(module)
    for unit in units:
        unit.compile(backend=backend, fullgraph=True)
    return units


def compile_units(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that ``compile_in_place`` compiles.

    Under FSDP2 each innermost sharded block by itself, so that the hooks which gather and reshard parameters stay
    outside the graphs: Dynamo never traces them. Blocks of a model that says ``blocks_alike`` too: one graph
    then serves all of them. Any other module is compiled whole.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    innermost = [part for part in sharded if not _holds_another(part)]
    if innermost:
        return tuple(innermost)
    alike: bool = getattr(module, "blocks_alike", False)
    blocks = getattr(module, "blocks", None)
    return tuple(blocks.values()) if alike and isinstance(blocks, nn.ModuleDict) and len(blocks) else (module,)


def _holds_another(part: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) for child in part.modules() if child is not part)
