"""Reads ONNX models without torch: their outline, what they depend on, and why one is refused."""

from service.formats.onnx.checks import FLOATS, name_of
from service.formats.onnx.choices import ChoiceError, chosen, with_labels
from service.formats.onnx.dependence import Dependence, graphs_in, names_in, ordered, read_by
from service.formats.onnx.halves import precision_of
from service.formats.onnx.inputs import inputs_of, texts_in
from service.formats.onnx.model_file import (
    INNER,
    LARGEST,
    LARGEST_READ,
    OnnxError,
    Outline,
    batch_of_one,
    constant_conditions,
    counted_loops,
    depending,
    first_line,
    graph_input,
    message_of,
    operator_of,
    opset_of,
    outline,
    outline_of,
    parse,
    unpacked,
    working_nodes,
)
from service.formats.onnx.operators import OPERATORS, advice
from service.formats.onnx.rounds import SEQUENCES, body_of, goes_on

__all__ = [
    "FLOATS",
    "INNER",
    "LARGEST",
    "LARGEST_READ",
    "OPERATORS",
    "SEQUENCES",
    "ChoiceError",
    "Dependence",
    "OnnxError",
    "Outline",
    "advice",
    "batch_of_one",
    "body_of",
    "chosen",
    "constant_conditions",
    "counted_loops",
    "depending",
    "first_line",
    "goes_on",
    "graph_input",
    "graphs_in",
    "inputs_of",
    "message_of",
    "name_of",
    "names_in",
    "operator_of",
    "opset_of",
    "ordered",
    "outline",
    "outline_of",
    "parse",
    "precision_of",
    "read_by",
    "texts_in",
    "unpacked",
    "with_labels",
    "working_nodes",
]
