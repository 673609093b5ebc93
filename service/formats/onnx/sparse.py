"""Writes the sparse tensors of an ONNX file as the dense ones that onnxruntime makes of them."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx.checks import attributes_of
from service.formats.onnx.dependence import graphs_in
from service.formats.onnx.kinds import OnnxError

MOST_ENTRIES = 2**24
"""The most entries of all sparse tensors together: a few bytes may tell of any number."""


def with_dense_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without sparse tensors. Raises :class:`OnnxError`."""
    written = _DenseWriter()
    graphs = {id(graph): graph for _, node, _ in attributes_of(model) for graph in graphs_in(node)}
    for graph in (model.graph, *graphs.values()):
        graph.initializer.extend(written.dense(each, each.values.name) for each in graph.sparse_initializer)
        graph.ClearField("sparse_initializer")
    for where, _, attribute in attributes_of(model):
        if attribute.HasField("sparse_tensor"):  # of a ``Constant``
            attribute.CopyFrom(helper.make_attribute("value", written.dense(attribute.sparse_tensor, where)))
    return model


class _DenseWriter:
    def __init__(self) -> None:
        self._entries = 0

    def dense(self, sparse: onnx.SparseTensorProto, name: str) -> TensorProto:
        """Return the tensor, whose places are numbers in C order, or one for each dimension."""
        shape = tuple(sparse.dims)
        self._entries += prod(shape)
        if min(shape, default=0) < 0 or self._entries > MOST_ENTRIES:
            raise OnnxError(
                f"sparse tensor {name!r} has shape {list(shape[:8])}; at most {MOST_ENTRIES} entries in all"
            )
        if sparse.values.data_type == TensorProto.STRING:
            raise OnnxError(f"sparse tensor {name!r} holds text; expected numbers")
        try:
            values, places = map(numpy_helper.to_array, (sparse.values, sparse.indices))
            found = np.zeros(prod(shape), values.dtype)
            flat = places if places.ndim == 1 else np.ravel_multi_index(tuple(places.T), shape)
            found[np.ravel_multi_index((flat,), (len(found),))] = values.reshape(len(flat))
            return numpy_helper.from_array(found.reshape(shape), name)
        except (TypeError, ValueError) as error:
            raise OnnxError(f"sparse tensor {name!r} of shape {list(shape[:8])}: {error}") from error
