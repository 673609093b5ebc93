"""ONNX operators in terms of torch: one small function each, a file for each family.

``(call, values, shape of the first output)`` to the output; ``values`` follow the node's inputs, the first or one of
which depends on the model's input. :class:`UnsupportedModelError` names a node whose form is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.onnx import arranging, entrywise, matrices, norms, pools, reductions, windows
from service.bounds.onnx.values import Converter

CONVERTERS: Mapping[str, Converter] = {
    **arranging.CONVERTERS,
    **entrywise.CONVERTERS,
    **matrices.CONVERTERS,
    **norms.CONVERTERS,
    **pools.CONVERTERS,
    **reductions.CONVERTERS,
    **windows.CONVERTERS,
}
