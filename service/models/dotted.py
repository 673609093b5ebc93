"""Resolves dotted names: a declaration without torch points to code of ranks by them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def dotted(name: str) -> Any:
    """Return what ``package.module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
