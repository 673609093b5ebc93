"""The windows of an ONNX pool: which entries each of them holds, and whether one of them holds padding only.

At submit nothing is run: lengths are those that a file declares, or that follow from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_OVER_WINDOWS = POOLS | {"Conv"}
MOST_PLACES = 2**20
"""The most entries of all windows along one dimension that are looked at before anything is run."""
ONLY_PADDING = "one of its windows holds padding only; expected an entry of the input in each"
_SAME_LENGTHS = frozenset(
    {
        *("Abs", "BatchNormalization", "Cast", "Clip", "Dropout", "Elu", "Exp", "Identity", "InstanceNormalization"),
        *("LRN", "LeakyRelu", "Neg", "PRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Tanh"),
    }
)
"""Operators whose result has the shape of their first input."""
Lengths = tuple[int, ...]


def listed(attributes: Mapping[str, Any], name: str, length: int, default: int = 1) -> list[int]:
    """Return an attribute of one number for each dimension."""
    return [int(entry) for entry in attributes.get(name) or [default] * length]


def pads_of(
    attributes: Mapping[str, Any], lengths: Sequence[int], kernel: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding before and after each dimension."""
    rank, mode = len(kernel), attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        given = listed(attributes, "pads", 2 * rank, 0) if mode == "NOTSET" else [0] * (2 * rank)
        return given[:rank], given[rank:]
    before, after, strides = list[int](), list[int](), listed(attributes, "strides", rank)
    for length, size, dilation, stride in zip(lengths, kernel, dilations, strides, strict=True):
        missing = max((-(-length // stride) - 1) * stride + (size - 1) * dilation + 1 - length, 0)
        small, large = missing // 2, missing - missing // 2
        before.append(large if mode == "SAME_LOWER" else small)
        after.append(small if mode == "SAME_LOWER" else large)
    return before, after


def windows_along(attributes: Mapping[str, Any], given: Lengths, wanted: Lengths) -> list[NDArray[Any]]:
    """Return, for each dimension, the places ``(windows, kernel)`` in each window: −1 in the padding, −2 beyond it."""
    rank = len(given)
    kernel, strides, dilations = (listed(attributes, name, rank) for name in ("kernel_shape", "strides", "dilations"))
    before, after = pads_of(attributes, given, kernel, dilations)
    along = []
    for index in range(rank):
        start = np.arange(wanted[index])[:, None] * strides[index] - before[index]
        place = start + np.arange(kernel[index]) * dilations[index]
        inside = (place >= 0) & (place < given[index])
        beyond = place >= given[index] + after[index]
        along.append(np.where(inside, place, np.where(beyond, -2, -1)))
    return along


def holds_padding_only(along: Sequence[NDArray[Any]]) -> bool:
    """Return whether some window has no entry of the input."""
    return any(bool((places < 0).all(axis=1).any()) for places in along)


def pools_of_padding(model: onnx.ModelProto, nodes: Iterable[tuple[int, onnx.NodeProto]]) -> Iterator[int]:
    """Yield the numbers of the pools, among ``nodes`` in order of execution, that are known to have such a window.

    What cannot be read is left to the rank, which refuses it by name.
    """
    known = {
        each.name: lengths for each in (*model.graph.input, *model.graph.value_info) for lengths in _declared(each)
    }
    kernels = {tensor.name: tuple(tensor.dims[2:]) for tensor in model.graph.initializer}
    for index, node in nodes:
        given = known.get(node.input[0]) if node.input and node.output else None
        if given is None:
            continue
        if node.op_type in _SAME_LENGTHS:
            known.setdefault(node.output[0], given)
        elif node.op_type in _OVER_WINDOWS:
            try:
                attributes = _attributes(node, kernels)
                wanted = _reached(attributes, given)
                if wanted is not None and _is_refused(node, attributes, given, wanted):
                    yield index
            except (ArithmeticError, LookupError, TypeError, ValueError):
                continue
            if wanted is not None:
                known.setdefault(node.output[0], wanted)


def _attributes(node: onnx.NodeProto, kernels: Mapping[str, Lengths]) -> dict[str, Any]:
    found = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    found |= {name: each.decode() for name, each in found.items() if isinstance(each, bytes)}
    return {"kernel_shape": kernels[node.input[1]], **found} if node.op_type == "Conv" else found


def _is_refused(node: onnx.NodeProto, attributes: Mapping[str, Any], given: Lengths, wanted: Lengths) -> bool:
    """Return whether a rank would refuse the node: the mean of padding that counts is 0."""
    counts = node.op_type == "AveragePool" and attributes.get("count_include_pad", 0)
    return node.op_type in POOLS and not counts and holds_padding_only(windows_along(attributes, given, wanted))


def _declared(value: onnx.ValueInfoProto) -> Iterator[Lengths]:
    """Yield the lengths after the channels, if the file declares them all."""
    lengths = tuple(int(dim.dim_value) for dim in value.type.tensor_type.shape.dim)[2:]
    if lengths and all(each > 0 for each in lengths):
        yield lengths


def _reached(attributes: Mapping[str, Any], given: Lengths) -> Lengths | None:
    """Return the lengths of a result that goes over windows; ``None`` where only a run tells, as with ``ceil_mode``."""
    rank = len(given)
    kernel, strides, dilations = (listed(attributes, name, rank) for name in ("kernel_shape", "strides", "dilations"))
    numbers = (*kernel, *strides, *dilations)
    if attributes.get("ceil_mode", 0) or len(numbers) != 3 * rank or min(numbers) < 1:
        return None
    before, after = pads_of(attributes, given, kernel, dilations)
    if {len(before), len(after)} != {rank}:
        return None
    reach = [length + first + last for length, first, last in zip(given, before, after, strict=True)]
    sizes = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    wanted = tuple((have - size) // step + 1 for have, size, step in zip(reach, sizes, strides, strict=True))
    places = [number * size for number, size in zip(wanted, kernel, strict=True)]
    return wanted if min(wanted) > 0 and max(places) <= MOST_PLACES else None
