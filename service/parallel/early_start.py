"""Starts a CUDA device in threads of its own, beside a rank's work on the CPU.

The driver and the context take 0.2 s and the libraries of matrix products as long again, almost all of it in native
code that needs no Python. A failure here happens again, and is reported, when the rank itself uses the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable

import torch

from service.parallel.distributed import Launch

_DRIVER = "libcuda.so.1"
_SIDE = 8


def begin_context(device_type: str, launch: Launch) -> None:
    """Begin to make the CUDA context of this rank, if the device is one; torch takes it over."""
    if device_type == "cuda":
        _beside(lambda: _retain_context(launch.local_rank))


def begin_products(device: torch.device) -> None:
    """Begin to load the libraries of matrix products and choices for a CUDA device, once torch has started it."""
    if device.type == "cuda":
        _beside(lambda: use_once(device))


def use_once(device: torch.device) -> None:
    """Do the operations of the first bounds of a network, on very few numbers."""
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
        y = torch.nn.functional.linear(x, x, x[0])
        torch.where(y > 0, y, x).sort().values.amax().item()
        torch.baddbmm(y.expand(1, -1, -1), x.expand(1, -1, -1), y.expand(1, -1, -1)).sum().item()


def _beside(work: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=run, name="trivet-device", daemon=True).start()


def _retain_context(index: int) -> None:
    """Make the primary context of a device, which is the one that torch uses; the driver counts visible devices."""
    driver = ctypes.CDLL(_DRIVER)  # its calls let go of Python's lock
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, arguments in (
        (driver.cuInit, (ctypes.c_uint(0),)),
        (driver.cuDeviceGet, (ctypes.byref(device), ctypes.c_int(index))),
        (driver.cuDevicePrimaryCtxRetain, (ctypes.byref(context), device)),
    ):
        if call(*arguments) != 0:
            return
