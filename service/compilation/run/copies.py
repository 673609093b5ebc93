"""Moves tensors between the host and a device, and reads figures from it, all at once: each copy and each reading waits
for the work of all processes that share the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from service.parallel.containers import in_batches

K = TypeVar("K")
LARGE = 2**13
"""Elements from which on a copy to the device pays: a core of the host takes ten times as long to compare them."""
_PIECE, _PIECE_TO_DEVICE = 2**25, 2**26
"""Bytes that are copied to the host at once, where a piece must not show in peak memory, and to the device. The results
of most steps are one piece: each waits for its turn on the device, as long as all processes that share it take.
"""


def to_host(values: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Return copies on the host."""
    found = {key: value.to("cpu", copy=True) for key, value in values.items() if value.device.type == "cpu"}
    left = [(key, value) for key, value in values.items() if key not in found]
    for batch in in_batches(_wider_first(left), _PIECE):
        found |= _moved(batch, torch.device("cpu"))
    return {key: found[key] for key in values}


def near(values: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
    """Return the large tensors on ``device``, and the small ones where they are."""
    found = dict(values)
    far = [(key, value) for key, value in values.items() if value.device != device and value.numel() >= LARGE]
    for batch in in_batches(_wider_first(far), _PIECE_TO_DEVICE):
        found |= _moved(batch, device)
    return found


def read(figures: Mapping[K, Tensor]) -> dict[K, list[float]]:
    """Return the numbers of vectors of one length and type, waiting once for each device."""
    found: dict[K, list[float]] = {}
    for device in {value.device for value in figures.values()}:
        own = {key: value for key, value in figures.items() if value.device == device}
        found |= dict(zip(own, torch.stack(list(own.values())).tolist(), strict=True))
    return found


def _moved(batch: list[tuple[K, Tensor]], place: torch.device) -> dict[K, Tensor]:
    """Return copies of tensors, of which those of wider types come first: so each begins at a multiple of its type."""
    flat = torch.cat([value.contiguous().flatten().view(torch.uint8) for _, value in batch]).to(place)
    pieces = torch.split(flat, [value.nbytes for _, value in batch])
    return {key: piece.view(value.dtype).view(value.shape) for (key, value), piece in zip(batch, pieces, strict=True)}


def _wider_first(values: Iterable[tuple[K, Tensor]]) -> list[tuple[K, Tensor]]:
    return sorted(values, key=lambda each: -each[1].itemsize)
