"""Reads settings that silently leave code uncompiled, and sets the one that makes random draws comparable."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from service.torch_internals.table import internal, internal_if_there


def silent_switches(module: nn.Module) -> tuple[str, ...]:
    """Return settings of this process and marks on ``module`` that let it run uncompiled without an error."""
    config = internal("torch._dynamo.config")
    found = []
    if getattr(config, "suppress_errors", False):
        found.append("torch._dynamo.config.suppress_errors is on: compile errors fall back to eager")
    if getattr(config, "disable", False):
        found.append("torch._dynamo.config.disable is on (TORCH_COMPILE_DISABLE)")
    if _stance() not in {"default", "fail_on_recompile"}:
        found.append(f"the compiler stance is {_stance()!r}")
    if getattr(type(module).forward, "_torchdynamo_disable", False):
        found.append(f"{type(module).__name__}.forward is marked torch.compiler.disable")
    return tuple(found)


def eager_random_numbers() -> AbstractContextManager[Any]:
    """Make generated kernels draw the same random numbers as eager, so that dropout is compared number by number."""
    patch: AbstractContextManager[Any] = internal("torch._inductor.config").patch(fallback_random=True)
    return patch


def own_random_numbers() -> AbstractContextManager[Any]:
    """Make generated kernels draw random numbers as in a job."""
    patch: AbstractContextManager[Any] = internal("torch._inductor.config").patch(fallback_random=False)
    return patch


def nothing_compiled() -> AbstractContextManager[Any]:
    """Raise ``RuntimeError`` instead of compiling anything."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def _stance() -> str:
    """Return the global stance, taken as the default if it cannot be read."""
    return str(getattr(internal_if_there("torch._dynamo.eval_frame._stance"), "stance", "default"))
