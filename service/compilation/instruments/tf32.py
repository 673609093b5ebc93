"""Computes, on any device, the results that a GPU that multiplies in TF32 may give an uncompiled program.

With ``torch.backends.cudnn.allow_tf32``, which is on by default, cuDNN chooses by shape and layout whether a float32
convolution keeps 10 bits of its factors or 23. A compiled program with another layout gets another choice, and
both are right. So the uncompiled program is run once more with factors that have lost those bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from service.torch_internals.types import TorchDispatchMode

_LOST = 13
"""Bits of a float32 that TF32 lacks."""
_AMPERE = (8, 0)
_CONVOLUTIONS = {"aten::convolution": (0, 1), "aten::convolution_backward": (0, 1, 2)}
_PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
"""Operators by name, and which of their arguments are factors."""


def factors_that_may_lose_bits(device: torch.device) -> Mapping[str, tuple[int, ...]]:
    """Return the operators that may be computed in TF32 there, by name, with the places of their factors."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _AMPERE:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    with suppress(RuntimeError):  # settings of two kinds contradict each other; the intended one is unknown
        found |= _CONVOLUTIONS if torch.backends.cudnn.allow_tf32 else {}
        found |= _PRODUCTS if torch.backends.cuda.matmul.allow_tf32 else {}
    return found


@contextmanager
def full_float32() -> Iterator[None]:
    """Let nothing be computed in TF32, within; to be entered where its settings do not contradict each other."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    try:
        cudnn.allow_tf32 = matmul.allow_tf32 = False
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


class FactorsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Counts the ``calls`` of operators that have factors, in whatever type."""

    def __init__(self, factors: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self._factors = factors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        places = self._factors.get(func.name().partition(".")[0], ())
        self.calls += bool(places)
        return func(*self._replace(args, places), **(kwargs or {}))

    def _replace(self, args: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
        return args


class InTf32(FactorsSeen):  # type: ignore[no-untyped-call]  # as above
    """Rounds factors of float32 to TF32. ``rounded`` counts the calls in which there were any."""

    rounded = 0

    def _replace(self, args: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
        if not any(place < len(args) and _loses(args[place]) for place in places):
            return args
        self.rounded += 1
        return tuple(tf32(each) if place in places and _loses(each) else each for place, each in enumerate(args))


def tf32(values: Tensor) -> Tensor:
    """Return values of float32 rounded to the nearest that TF32 has."""
    bits = values.detach().contiguous().view(torch.int32)
    nearest = ((bits + (1 << (_LOST - 1))) >> _LOST << _LOST).view(torch.float32).reshape(values.shape)
    return torch.where(values.isfinite() & nearest.isfinite(), nearest, values)


def _loses(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.dtype is torch.float32
