"""Represents rows over an image that are zero outside of a patch, such as a convolution's rows after a few layers.

A row starts at one place of an image, and every convolution backward widens its patch; while it is smaller than the
image, only the patch is kept (patches, Xu et al., 2020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds import fused
from service.bounds.linear.rows.structured import StructuredRows

Pair = tuple[int, int]
WORTHWHILE = 0.7
"""Share of the image above which a patch does not pay."""
FEW = 2
"""Places for each row up to which the windows of all places are written out."""


def image_of(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return channels, height and width of a value that is an image, whatever dimensions of length 1 precede them."""
    if len(shape) < len(IMAGE) or any(length != 1 for length in shape[: -len(IMAGE)]):
        return None
    return (shape[-3], shape[-2], shape[-1])


IMAGE = ("channels", "height", "width")


@dataclass(frozen=True, eq=False)
class Patches(StructuredRows):
    """``values`` ``(b, rows, channels, height, width)`` of patches whose upper left corners are at
    ``place · stride + offset``, partly outside of the image maybe.

    ``place`` ``(batch or 1, rows, 2)`` are places in the image of size ``grid`` at which the rows started. Where they
    are ``inside``, their values outside of the image are 0.
    """

    values: Tensor
    place: Tensor
    grid: Pair
    stride: Pair = (1, 1)
    offset: Pair = (0, 0)
    inside: bool = False

    @staticmethod
    def at(index: Tensor, channels: Tensor, grid: Pair) -> Patches:
        """Return ``channels`` ``(b, rows, c, height, width)`` around entries ``index`` ``(b, rows)`` of an image."""
        place = index.remainder(grid[0] * grid[1])
        return Patches(channels, torch.stack([place // grid[1], place.remainder(grid[1])], dim=2), grid)

    @property
    def size(self) -> Pair:
        return (self.values.shape[3], self.values.shape[4])

    @property
    def moves(self) -> tuple[Pair, Pair]:
        """Return the factor and the offset of places."""
        return self.stride, self.offset

    def is_worthwhile(self, shape: tuple[int, ...]) -> bool:
        """Return whether patches are smaller than an image ``(…, channels, height, width)``, by enough."""
        return self.size[0] * self.size[1] < WORTHWHILE * shape[-2] * shape[-1]

    def before(self, values: Tensor, stride: Pair, padding: Pair) -> Patches:
        """Return the patches that a convolution computed these ones from."""
        offset = tuple(step * own - pad for step, own, pad in zip(stride, self.offset, padding, strict=True))
        strides = tuple(step * own for step, own in zip(stride, self.stride, strict=True))
        moved = (strides[0], strides[1]), (offset[0], offset[1])
        return replace(self, values=values, stride=moved[0], offset=moved[1], inside=False)

    def margins(self, shape: tuple[int, ...]) -> tuple[Pair, Pair]:
        """Return how far patches may reach over the image before and behind, vertically and horizontally."""
        found = []
        for axis in (0, 1):
            last = (self.grid[axis] - 1) * self.stride[axis] + self.offset[axis] + self.size[axis]
            found.append((max(0, -self.offset[axis]), max(0, last - shape[axis - 2])))
        return found[0], found[1]

    def corners(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the patches' corners in the image with its margins, each ``(batch or 1, rows)``."""
        (top, _), (left, _) = self.margins(shape)
        down = self.place[..., 0] * self.stride[0] + (self.offset[0] + top)
        right = self.place[..., 1] * self.stride[1] + (self.offset[1] + left)
        return down, right

    def of(self, image: Tensor) -> Tensor:
        """Return patches of ``(batch, …, channels, height, width)``, zero outside of it, shaped like ``values``."""
        image = image.reshape(len(image), *image.shape[-3:])
        (top, bottom), (left, right) = self.margins(tuple(image.shape[1:]))
        padded = functional.pad(image, (left, right, top, bottom))
        everywhere = padded.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)
        batch, rows, places = len(image), self.place.shape[1], self.grid[0] * self.grid[1]
        if places <= FEW * rows:
            return self._from_all_places(everywhere[:, :, self.offset[0] + top :, self.offset[1] + left :])
        down, across = (each.expand(batch, -1) for each in self.corners(tuple(image.shape[1:])))
        shown: Tensor = everywhere[torch.arange(batch, device=image.device)[:, None], :, down, across]
        return shown

    def _from_all_places(self, windows: Tensor) -> Tensor:
        """Return the patches of ``windows`` ``(batch, channels, down, across, height, width)``, the first of which is
        that of the first place: whole windows move several times as fast as entries.
        """
        (height, width), (down, across) = self.grid, self.stride
        at_places = windows[:, :, ::down, ::across][:, :, :height, :width].permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        before = torch.arange(len(windows), device=windows.device)[:, None] * (height * width)
        number = before + self.place[..., 0] * width + self.place[..., 1]
        return at_places.index_select(0, number.flatten()).reshape(*number.shape, *at_places.shape[1:])

    def of_each(self, *images: Tensor) -> tuple[Tensor, ...]:
        """Return :meth:`of` of several images of one shape."""
        together = torch.cat([image.reshape(len(image), *image.shape[-3:]) for image in images], dim=1)
        return self.of(together).chunk(len(images), dim=2)

    def clipped(self, shape: tuple[int, ...]) -> Patches:
        """Return patches that are zero outside of their image."""
        if self.inside or not any(map(any, self.margins(shape))):
            return self
        ones = self.values.new_ones(len(self.place), 1, *shape[-2:])
        return replace(self, values=self.values * self.of(ones), inside=True)

    def dense(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the rows over the whole image, ``(b, rows, *shape)``."""
        (top, bottom), (left, right) = self.margins(shape)
        height, width = shape[-2] + top + bottom, shape[-1] + left + right
        down, across = self.corners(shape)
        steps = [torch.arange(length, device=like.device) for length in self.size]
        index = (down[..., None, None] + steps[0][:, None]) * width + across[..., None, None] + steps[1]
        flat = self.values.flatten(3)
        index = index.flatten(2).unsqueeze(2).expand(*flat.shape)
        whole = flat.new_zeros(*flat.shape[:3], height * width).scatter(3, index, flat)
        whole = whole.reshape(*flat.shape[:3], height, width)
        inside = whole[..., top : top + shape[-2], left : left + shape[-1]]
        return inside.reshape(*flat.shape[:2], *shape)

    def plus(self, other: StructuredRows) -> Patches | None:
        """Return the sum, in patches around both; ``None`` if their patches move differently."""
        if not isinstance(other, Patches) or (self.stride, self.grid) != (other.stride, other.grid):
            return None
        first = (min(self.offset[0], other.offset[0]), min(self.offset[1], other.offset[1]))
        last = tuple(
            max(own + size, theirs + their_size)
            for own, size, theirs, their_size in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        values = self._within(first, (last[0], last[1])) + other._within(first, (last[0], last[1]))
        return replace(self, values=values, offset=first, inside=self.inside and other.inside)

    def _within(self, first: Pair, last: Pair) -> Tensor:
        (top, left), (height, width) = (self.offset[0] - first[0], self.offset[1] - first[1]), self.size
        below, behind = last[0] - self.offset[0] - height, last[1] - self.offset[1] - width
        return functional.pad(self.values, (left, behind, top, below))

    def least(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return the least value ``(batch, rows)`` over a box of images."""
        found = fused.least_in_patches(self.values, self.place, self.moves, lower, upper)
        if found is not None:
            return found
        centre, radius = self.of_each(lower / 2 + upper / 2, upper / 2 - lower / 2)
        return (self.values * centre - self.values.abs() * radius).flatten(2).sum(dim=2)
