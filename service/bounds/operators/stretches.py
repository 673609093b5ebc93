"""Bounds the largest singular value of matrices and of convolutions, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn import functional

LARGE = 2**22
"""Entries of a matrix beyond which its eigenvalues take too long."""
WORTHWHILE = 2**31
"""Multiplications for the singular values of a kernel at all frequencies that are worth the while."""


@torch.no_grad()
def stretch_of_matrix(matrix: Tensor) -> float:
    """Return the largest singular value of ``(rows, columns)``, or of a large matrix a bound of it."""
    exact = matrix.double()
    if exact.numel() > LARGE:
        # Schur's test, and Frobenius' norm.
        sizes = exact.abs()
        return float(torch.minimum((sizes.sum(dim=0).amax() * sizes.sum(dim=1).amax()).sqrt(), exact.norm()))
    shorter = exact if exact.shape[0] <= exact.shape[1] else exact.mT
    return float(torch.linalg.eigvalsh(shorter @ shorter.mT)[-1].clamp(min=0).sqrt()) if exact.numel() else 0.0


@torch.no_grad()
def stretch_of_kernel(kernel: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int, size: int) -> float:
    """Return a bound of the largest singular value of a convolution with zeros around it.

    ``kernel`` is ``(outputs, inputs of a group, *lengths)``; ``size`` is the longest side of the padded input.
    """
    lengths = kernel.shape[2:]
    is_dense = all(step == 1 for step in dilation)
    # Each entry of the input is in so many patches, of which each becomes the outputs at one place.
    patches = prod(ceil(length / step) if is_dense else length for length, step in zip(lengths, stride, strict=True))
    matrices = kernel.flatten(1).reshape(groups, len(kernel) // groups, -1)
    found: float = max(map(stretch_of_matrix, matrices)) * patches**0.5
    if is_dense and groups == 1 and len(lengths) == PLANE:
        found = min(found, _at_frequencies(kernel.double(), (stride[0], stride[-1]), size, found))
    return found


PLANE = 2


def _at_frequencies(kernel: Tensor, stride: tuple[int, int], size: int, otherwise: float) -> float:
    """Return the largest singular value of the convolution on a torus so large that nothing goes round: the convolution
    of the image is a part of it. On a torus, it is a matrix for each frequency (Sedghi, Gupta and Long, 2019).
    """
    outputs, inputs, *lengths = kernel.shape
    steps = [ceil(length / step) for length, step in zip(lengths, stride, strict=True)]
    # With a stride, the inputs at each phase are channels of their own.
    more = [step * own - length for length, step, own in zip(lengths, steps, stride, strict=True)]
    padded = functional.pad(kernel, (0, more[1], 0, more[0]))
    phases = padded.reshape(outputs, inputs, steps[0], stride[0], steps[1], stride[1]).permute(0, 1, 3, 5, 2, 4)
    phases = phases.reshape(outputs, inputs * prod(stride), *steps)
    side = ceil(size / min(stride)) + max(steps)
    fewer, more_channels = sorted(phases.shape[:2])
    if side**2 * fewer**2 * (fewer + more_channels) > WORTHWHILE:
        return otherwise
    matrices = torch.fft.rfft2(phases, s=(side, side)).permute(2, 3, 0, 1)
    return float(torch.linalg.matrix_norm(matrices, ord=2).amax())
