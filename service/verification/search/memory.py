"""What memory a search may take."""

from __future__ import annotations

import torch

HOST_BYTES = 2**31
"""For a batch on a device without a memory of its own."""


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_BYTES
    # What torch holds without using it is free for it too.
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
