"""Marks the operations of a traced model by their names in the file that it came from."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.fx import Node as FxNode
from torch.fx.traceback import annotate, preserve_node_meta

_KEY = "trivet_source"


def annotated(name: str) -> AbstractContextManager[object]:
    """Return a context whose traced operations belong to the operation ``name``."""
    return annotate({_KEY: name})


def kept_by(module: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a trace keeps the names, for a module that says by ``names_operations`` that it gives
    them.
    """
    return preserve_node_meta() if getattr(module, "names_operations", False) else nullcontext()


def source_of(fx: FxNode) -> str:
    """Return the name that a traced operation was marked with; empty without one."""
    return str((fx.meta.get("custom") or {}).get(_KEY, ""))
