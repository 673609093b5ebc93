"""Which parameters of a test, and how many examples of a property, the fast command takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

leaves_slow_out = False
"""Whether this run is the fast command; conftest.py says so before any test is imported."""


def examples(fast: int, every: int) -> int:
    """Return how many examples of a property are tried: by the fast command, and by all others."""
    return fast if leaves_slow_out else every


def slow_but_for(every: Iterable[Any], *fast: Any) -> list[Any]:
    """Return every parameter, or tuple of parameters, with all but the ``fast`` ones marked slow."""
    parameters = list(every)
    assert all(each in parameters for each in fast), "what is fast is one of them"
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=[] if each in fast else [pytest.mark.slow])
        for each in parameters
    ]


def first_fast(count: int, every: Iterable[Any]) -> list[Any]:
    """Return every parameter with all but the first ``count`` marked slow."""
    parameters = list(every)
    return slow_but_for(parameters, *parameters[:count])
