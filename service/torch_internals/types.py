"""Gives those of torch's private classes that serve as types. Importing it imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.torch_internals.table import internal

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    OpOverload = internal("torch._ops.OpOverload")
    TorchDispatchMode = internal("torch.utils._python_dispatch.TorchDispatchMode")

__all__ = ["SCHEMA", "OpOverload", "TorchDispatchMode"]

SCHEMA = "torch.ops.aten.relu.default._schema"
"""The table's name for the schema of any operator."""
