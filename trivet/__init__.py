"""The Python client: ``trivet.Client`` submits jobs and follows them. Importing it is cheap; torch is never loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.async_client import AsyncClient
    from trivet.client import Client
    from trivet.errors import JobFailed, ModuleRefused, Refused, TrivetError, Unreachable

__all__ = ["AsyncClient", "Client", "JobFailed", "ModuleRefused", "Refused", "TrivetError", "Unreachable"]

_HOMES = {
    "AsyncClient": "trivet.async_client",
    "Client": "trivet.client",
    "JobFailed": "trivet.errors",
    "ModuleRefused": "trivet.errors",
    "Refused": "trivet.errors",
    "TrivetError": "trivet.errors",
    "Unreachable": "trivet.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trivet' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - loaded when first asked for

    return getattr(import_module(_HOMES[name]), name)
