"""Reads ONNX models without torch: their outline, what they depend on, and why one is refused."""

from service.formats.onnx.checks import name_of
from service.formats.onnx.choices import ChoiceError, chosen, with_labels
from service.formats.onnx.content import LARGEST_READ, read_message, unpacked
from service.formats.onnx.dependence import (
    SEQUENCES,
    Dependence,
    body_of,
    constant_conditions,
    counted_loops,
    dependence_of,
    goes_on,
    graphs_in,
    names_in,
    operator_of,
    ordered,
    read_by,
    working_nodes,
)
from service.formats.onnx.halves import precision_of
from service.formats.onnx.inputs import batch_of_one, graph_input, inputs_of
from service.formats.onnx.joined import JoinedPart, join_networks
from service.formats.onnx.kinds import FLOATS, OnnxError, first_line
from service.formats.onnx.model_file import INNER, OPSETS, Outline, opset_of, outline, outline_of, parse
from service.formats.onnx.operators import OPERATORS, advice
from service.formats.onnx.outputs import texts_in, with_outputs
from service.formats.onnx.pools import ONLY_PADDING, holds_padding_only, listed, pads_of, windows_along

__all__ = [
    "FLOATS",
    "INNER",
    "LARGEST_READ",
    "ONLY_PADDING",
    "OPERATORS",
    "OPSETS",
    "SEQUENCES",
    "ChoiceError",
    "Dependence",
    "JoinedPart",
    "OnnxError",
    "Outline",
    "advice",
    "batch_of_one",
    "body_of",
    "chosen",
    "constant_conditions",
    "counted_loops",
    "dependence_of",
    "first_line",
    "goes_on",
    "graph_input",
    "graphs_in",
    "holds_padding_only",
    "inputs_of",
    "join_networks",
    "listed",
    "name_of",
    "names_in",
    "operator_of",
    "opset_of",
    "ordered",
    "outline",
    "outline_of",
    "pads_of",
    "parse",
    "precision_of",
    "read_by",
    "read_message",
    "texts_in",
    "unpacked",
    "windows_along",
    "with_labels",
    "with_outputs",
    "working_nodes",
]
