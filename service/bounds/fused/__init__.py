"""Steps of a pass that are one kernel each on a CUDA device.

Every function here has the same meaning on any device: where its kernel cannot be built, torch's operators do the
same in several steps. Results differ by rounding only.
"""

from service.bounds.fused.adam import Adam
from service.bounds.fused.boxes import least
from service.bounds.fused.images import least_in_windows, pull_in_windows
from service.bounds.fused.lines import FreeSlopes, Picked, pull, pull_free, weighted
from service.bounds.fused.matrices import product, product_in_ascent
from service.bounds.fused.products import pull_matrices, pull_products
from service.bounds.fused.tables import pull_table

__all__ = [
    "Adam",
    "FreeSlopes",
    "Picked",
    "least",
    "least_in_windows",
    "product",
    "product_in_ascent",
    "pull",
    "pull_free",
    "pull_in_windows",
    "pull_matrices",
    "pull_products",
    "pull_table",
    "weighted",
]
