"""Finds out whether kernels can be built for a device."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)
WIDEST = 1024


def kernels_for(*tensors: Tensor | None, entries: int | None = None) -> ModuleType | None:
    """Return the kernels, if they can work on these tensors: floating-point ones of one type on one CUDA device.

    ``entries`` is the number of entries to work on, by default the first tensor's: for a few, no kernel is built.
    """
    given = [each for each in tensors if each is not None]
    first = given[0]
    if not first.is_cuda or first.dtype not in TYPES or torch.compiler.is_compiling():
        return None
    if (first.numel() if entries is None else entries) < FEWEST:
        return None
    alike = all(each.dtype == first.dtype and each.device == first.device for each in given)
    return _built(first.device) if alike else None


FEWEST = 2**14
TYPES = (torch.float32, torch.float64)


@cache
def _built(device: torch.device) -> ModuleType | None:
    """Try once whether kernels build: without a compiler on the machine Triton fails at the first launch."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first fused step of a process came inside of a CUDA graph's recording")
    try:
        from service.bounds.fused import kernels  # noqa: PLC0415 - there is no Triton without CUDA

        with torch.cuda.device(device):
            kernels.ones[(1,)](torch.empty(16, device=device), BLOCK=16)
    except Exception as error:  # a compiler or a driver may raise anything
        LOG.warning("bounds on %s go without fused kernels: %s: %s", device, type(error).__name__, error)
        return None
    return kernels


def block(n: int) -> dict[str, Any]:
    """Return the entries of one program, and its warps."""
    size = min(WIDEST, max(32, 1 << (n - 1).bit_length()))
    return {"BLOCK": size, "num_warps": max(1, min(4, size // 128))}


def strides(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of batch and row of ``(batch or 1, rows or 1, n)``; 0 if there is only one."""
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0, tensor.stride(1) if tensor.shape[1] > 1 else 0)


def flat(tensor: Tensor) -> Tensor:
    """Return ``(batch, rows, *shape)`` as ``(batch, rows, n)`` whose entries of a row are contiguous."""
    joined = tensor.flatten(2)
    return joined if joined.stride(2) == 1 or joined.shape[2] == 1 else joined.contiguous()
