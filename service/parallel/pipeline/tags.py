"""Names of pipeline messages as numbers, and the header that announces a tensor's type and shape. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

TAG_LIMIT = 2**31 - 1
_MAGIC = 0x7452_4956
MAX_DIMENSIONS = 8
HEADER_LENGTH = 4 + MAX_DIMENSIONS
# The position in this list is what travels: append only.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class Direction(IntEnum):
    """Says which way a message crosses a boundary: activations, like bounds, go to the next stage; gradients to the one
    before.
    """

    ACTIVATION = 0
    GRADIENT = 1


@dataclass(frozen=True)
class Message:
    """One tensor over ``boundary`` s, which lies between the virtual stages s and s + 1."""

    boundary: int
    micro_batch: int
    kind: Direction

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} over boundary {self.boundary}, micro-batch {self.micro_batch}"


class TransportError(RuntimeError):
    """A message cannot be sent, or is not the one announced."""


@dataclass(frozen=True)
class TagSpace:
    """``base(boundary) + 2·micro_batch`` forward and one more backward; the last pair of a boundary is for headers.

    Raises :class:`TransportError` when the largest tag exceeds what a backend can carry (31 bits).
    """

    boundaries: int
    micro_batches: int

    def __post_init__(self) -> None:
        largest = self.boundaries * self.stride - 1
        if largest > TAG_LIMIT:
            raise TransportError(
                f"{self.boundaries} boundaries × 2 × ({self.micro_batches} micro-batches + 1 header) need tags up to "
                f"{largest}; the largest is {TAG_LIMIT}"
            )

    @property
    def stride(self) -> int:
        return 2 * (self.micro_batches + 1)

    def base(self, boundary: int) -> int:
        return boundary * self.stride

    def tag(self, message: Message) -> int:
        if not (0 <= message.boundary < self.boundaries and 0 <= message.micro_batch < self.micro_batches):
            raise TransportError(
                f"no tag for {message}: there are {self.boundaries} boundaries and {self.micro_batches} micro-batches"
            )
        return self.base(message.boundary) + 2 * message.micro_batch + message.kind

    def header(self, boundary: int, kind: Direction) -> int:
        return self.base(boundary) + 2 * self.micro_batches + kind


@dataclass(frozen=True)
class TensorKind:
    """Holds the facts on which both sides must agree before a tensor moves."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorKind:
        return TensorKind(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def encode_header(kind: TensorKind, tag: int) -> Tensor:
    """Return ``(magic, tag, dtype, dimensions, shape padded to 8)`` as int64."""
    if kind.dtype not in DTYPES or len(kind.shape) > MAX_DIMENSIONS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TransportError(f"{kind} cannot be announced: at most {MAX_DIMENSIONS} dimensions of {known}")
    padding = (0,) * (MAX_DIMENSIONS - len(kind.shape))
    return torch.tensor((_MAGIC, tag, DTYPES.index(kind.dtype), len(kind.shape), *kind.shape, *padding))


def decode_header(header: Tensor, tag: int) -> TensorKind:
    """Return the tensor that a header announces. Raises :class:`TransportError` for anything else, or another message's
    header.
    """
    magic, announced, dtype, dimensions, *shape = header.tolist()
    if magic != _MAGIC or not 0 <= dtype < len(DTYPES) or not 0 <= dimensions <= MAX_DIMENSIONS:
        raise TransportError(f"expected the header of tag {tag}, got {header.tolist()}")
    if announced != tag:
        raise TransportError(f"expected the header of tag {tag}, got that of tag {announced}: messages out of order")
    return TensorKind(tuple(shape[:dimensions]), DTYPES[dtype])
