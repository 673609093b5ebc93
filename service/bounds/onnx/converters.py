"""ONNX operators in terms of torch: what each operator declares of itself, and the rest in a file for each family.

``(call, values, shape of the first output)`` to the output; ``values`` follow the node's inputs, the first or one of
which depends on the model's input. :class:`UnsupportedModelError` names a node whose form is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.onnx import (
    arranging,
    attention,
    entrywise,
    extensions,
    logic,
    matrices,
    quantised,
    recurrent,
    reductions,
    scattering,
    selecting,
    windows,
)
from service.bounds.operators import OPERATORS
from service.bounds.operators.conversion import Converter
from service.formats.onnx import OPERATORS as LISTED


def _declared(converters: Mapping[str, Converter]) -> Mapping[str, Converter]:
    """Return the converters, which must be those of the torch-free list of names that specs are checked by.

    Raises ``ImportError`` with the names that have no converter, and the converters that are not in the list.
    """
    missing, unlisted = LISTED - converters.keys(), converters.keys() - LISTED
    if missing or unlisted:
        raise ImportError(f"ONNX operators without a converter: {sorted(missing)}; not in the list: {sorted(unlisted)}")
    return converters


_FAMILIES = (
    arranging, attention, entrywise, extensions, logic, matrices, quantised, recurrent, reductions,
    scattering, selecting, windows,
)  # fmt: skip
CONVERTERS: Mapping[str, Converter] = _declared(
    {
        name: converter
        for converters in (
            *(operator.onnx for operator in OPERATORS.values()),
            *(family.CONVERTERS for family in _FAMILIES),
        )
        for name, converter in converters.items()
    }
)
