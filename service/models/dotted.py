"""Attributes by dotted name: how a declaration without torch points to what ranks call."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def dotted(name: str) -> Any:
    """Return what ``package.module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
