"""Defines the kernels, in Triton. One program works on one row of coefficients, ``n`` entries in blocks.

Pointers come with the strides of batch and row; a stride of 0 repeats. Entries of a row are contiguous. Numbers that
say nothing about how entries lie in memory are not specialised on: each variant takes a quarter of a second to build.
"""

from service.bounds.fused.kernels.boxes import backward_least, forward_least, least_in_patches, lines_in_patches
from service.bounds.fused.kernels.lines import backward_lines, forward_lines
from service.bounds.fused.kernels.products import (
    backward_matrices,
    backward_products,
    forward_matrices,
    forward_products,
)
from service.bounds.fused.kernels.steps import adam, ones, rough_product
from service.bounds.fused.kernels.tables import backward_table, forward_table

__all__ = [
    "adam",
    "backward_least",
    "backward_lines",
    "backward_matrices",
    "backward_products",
    "backward_table",
    "forward_least",
    "forward_lines",
    "forward_matrices",
    "forward_products",
    "forward_table",
    "least_in_patches",
    "lines_in_patches",
    "ones",
    "rough_product",
]
