"""Untrusted arrays in NumPy's format: what a header claims, and whether the data is there."""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

BROKEN = (
    ValueError,
    TypeError,
    EOFError,
    OSError,
    RuntimeError,
    SystemError,  # of Python 3.12, whose tokenizer does not take the null bytes of a header for an error
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What reading a broken file raises."""
_HEADERS: Mapping[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = (
    MappingProxyType({(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0})
)
"""The third version is for names of fields, which arrays of numbers do not have."""


def check_claim(file: IO[bytes], size: int) -> None:
    """Compare the header that ``file`` of ``size`` bytes begins with to that size, before memory is taken for it.

    Raises one of :data:`BROKEN`.
    """
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is none for numbers")
    shape, _, kind = _HEADERS[version](file)
    claimed = prod(shape) * kind.itemsize
    if min(shape, default=0) < 0 or claimed > size:
        raise ValueError(f"its header claims shape {shape} of {kind}, which {size} bytes do not hold")
