"""Provides steps of a pass as one kernel each on a CUDA device.

Every function means the same on any device: if its kernel cannot be built, torch's operators do the same in several
steps. Results differ by rounding only.
"""

from service.bounds.fused.adam import Adam
from service.bounds.fused.boxes import least, least_in_patches, propagate_patches
from service.bounds.fused.lines import (
    FreeSlopes,
    propagate_bent_lines,
    propagate_free_slopes,
    propagate_lines,
    weighted,
)
from service.bounds.fused.products import Ends, OntoBoth, propagate_matrices, propagate_products
from service.bounds.fused.tables import product, product_in_ascent, propagate_table

__all__ = [
    "Adam",
    "Ends",
    "FreeSlopes",
    "OntoBoth",
    "least",
    "least_in_patches",
    "product",
    "product_in_ascent",
    "propagate_bent_lines",
    "propagate_free_slopes",
    "propagate_lines",
    "propagate_matrices",
    "propagate_patches",
    "propagate_products",
    "propagate_table",
    "weighted",
]
