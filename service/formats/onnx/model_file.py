"""Reads ONNX models as far as possible without torch and without running them: what they take and give, and whether
they can be bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx

from service.formats.onnx.checks import (
    attributes_of,
    check_numbers,
    check_repeatable,
    check_tensor,
    name_of,
    tensors_in,
)
from service.formats.onnx.content import LARGEST, LARGEST_READ, TooLargeError, message_of, unpacked
from service.formats.onnx.dependence import Numbered, dependence_of, graphs_in, operator_of, supported
from service.formats.onnx.functions import FunctionError, inlined
from service.formats.onnx.halves import with_precision_told
from service.formats.onnx.inputs import (
    batch_of_one,
    check_inputs,
    graph_input,
    lengths_of,
    with_narrow_inputs,
    with_one_input,
    with_real_inputs,
)
from service.formats.onnx.kinds import OnnxError
from service.formats.onnx.operators import advice
from service.formats.onnx.outputs import (
    bounded_before,
    can_all_be_bounded,
    entries_of_outputs,
    rival_of,
    scores_only,
    shape_of_output,
    without_maps,
)
from service.formats.onnx.pools import ONLY_PADDING, pools_of_padding
from service.formats.onnx.sparse import with_dense_tensors

OPSETS = range(8, 25)
INNER = (
    "a graph within it depends on the input; supported are an If whose condition is a constant, and a Loop or Scan "
    "whose number of rounds is"
)


@dataclass(frozen=True)
class Outline:
    """Entries of one instance, and nodes that no rule bounds.

    ``outputs`` is ``None`` if only a run tells. ``names`` are those of the outputs, and ``instead`` values that can
    be bounded, on which such nodes depend. With ``has_labels``, some outputs that can be bounded are left out as
    labels; ``every`` counts the entries of all outputs. ``rival`` is the file's first output if it is left out and, as
    far as is known, as long as those that are not, ``rival_entries`` if its own length is.
    ``shape`` is that of the input at a batch of one, if more than one of its axes is longer than 1; ``output_shape``
    that of the only output, if there is no other and the file declares it.
    """

    inputs: int
    outputs: int | None
    unsupported: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    has_labels: bool = False
    every: int | None = None
    rival: str = ""
    rival_entries: int | None = None
    shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None

    def is_unclear(self, outputs: int) -> bool:
        """Return whether a query with so many outputs may be about the rival, or about the outputs that are left."""
        return bool(self.rival) and self.outputs in (None, outputs) and self.rival_entries in (None, outputs)

    @property
    def why_unclear(self) -> str:
        """Return why nobody can tell which output a query means, where there is a ``rival``."""
        listed = ", ".join(map(repr, self.names))
        return f"the query may be about the first output, {self.rival!r}, which is left out, or about {listed}"

    @property
    def to_be_clear(self) -> str:
        return f"model.outputs that names one of them, such as [{self.names[0]}]"


def parse(data: bytes) -> onnx.ModelProto:
    """Return the model of a file's content, compressed by gzip or not.

    Raises :class:`OnnxError` if it cannot be read.
    """
    return parse_unpacked(unpacked(data, LARGEST))


def parse_unpacked(content: bytes) -> onnx.ModelProto:
    """Return the model of a file's content that gzip did not compress, or of a zip with the files of its weights.
    Raises :class:`OnnxError`.
    """
    model = _with_every_output(content)
    found = dependence_of(model)
    return scores_only(model, found, supported(model, found))


def _with_every_output(content: bytes) -> onnx.ModelProto:
    model = message_of(content)
    if not model.graph.node or not model.graph.output:
        raise OnnxError("the file is not an ONNX model: it has no nodes or no outputs")
    opset = opset_of(model)
    if opset not in OPSETS:
        raise OnnxError(f"ONNX opset {opset}: {OPSETS[0]} to {OPSETS[-1]} are supported")
    for where, tensor in tensors_in(model):
        check_tensor(where, tensor)
    for where, node, attribute in attributes_of(model):
        check_numbers(where, node, attribute)
    check_repeatable(model)
    try:
        model = without_maps(inlined(with_dense_tensors(model)))
    except FunctionError as error:
        raise OnnxError(str(error)) from error
    model = with_narrow_inputs(with_real_inputs(with_precision_told(model)))
    check_inputs(model)
    model = with_one_input(model, opset)
    batch_of_one(graph_input(model))
    for output in model.graph.output:
        lengths_of(output)
    return model


def opset_of(model: onnx.ModelProto) -> int:
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def outline(path: Path, chosen: Callable[[bytes], bytes] = bytes) -> Outline | None:
    """Return the outline of the model that ``chosen`` makes of an uploaded file; ``None`` if the file is large.
    Raises :class:`OnnxError`.
    """
    if path.stat().st_size > LARGEST_READ:
        return None
    try:
        return outline_of(chosen(unpacked(path.read_bytes(), LARGEST_READ)))
    except TooLargeError:
        return None


def outline_of(content: bytes) -> Outline:
    """Return the outline of the model in a file's content that gzip did not compress. Raises :class:`OnnxError`."""
    model = _with_every_output(content)
    shape = batch_of_one(graph_input(model))
    found = dependence_of(model)
    bounded = supported(model, found)
    every, count = entries_of_outputs(model), len(model.graph.output)
    are_bounded = can_all_be_bounded(model, found, bounded)
    given = [onnx.ValueInfoProto.FromString(each.SerializeToString()) for each in model.graph.output]
    model = scores_only(model, found, bounded)
    names = tuple(output.name for output in model.graph.output)
    working = found.needed(names)
    beyond = [(index, node) for index, node in working if index not in bounded]
    return Outline(
        prod(shape),
        entries_of_outputs(model),
        (*_refusals(beyond), *_refusals_of_pools(model, working)),
        names,
        bounded_before(beyond, found, bounded),
        are_bounded and len(model.graph.output) < count,
        every,
        *rival_of(model, given),
        shape if sum(length > 1 for length in shape) > 1 else None,
        shape_of_output(model),
    )


def _refusals(nodes: Iterable[Numbered]) -> Iterator[str]:
    """Say of nodes that no rule bounds what they are, and what may help."""
    for index, node in nodes:
        operator = operator_of(node)
        why = f", as {INNER}" if any(graphs_in(node)) else advice(operator, node.input)
        yield f"ONNX {operator} (node {name_of(node, index)!r}){why}"


def _refusals_of_pools(model: onnx.ModelProto, working: Iterable[Numbered]) -> Iterator[str]:
    for index in pools_of_padding(model, working):
        node = model.graph.node[index]
        yield f"ONNX {operator_of(node)} (node {name_of(node, index)!r}), as {ONLY_PADDING}"
