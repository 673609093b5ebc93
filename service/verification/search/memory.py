"""What memory a search may take."""

from __future__ import annotations

import torch

from service.bounds.methods.base import free_bytes as free_on_device

HOST_BYTES = 2**31
"""For a batch on a device without a memory of its own."""


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_BYTES
    return free_on_device(device)
