"""Reads ONNX files as far as possible without torch and without running them.

A model may keep its weights in files beside it, as exporters write them: then it comes as a zip of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath

import onnx
from onnx import TensorProto

from service.formats.archive import ArchiveError, ArchiveMember, Unpacking, UploadError, members_of_zip
from service.formats.mistaken import mistaken_archive, mistaken_for_model
from service.formats.onnx.checks import (
    FLOATS,
    attributes_of,
    check_numbers,
    check_repeatable,
    check_tensor,
    check_texts,
    name_of,
    tensors_in,
    type_name,
)
from service.formats.onnx.checks import OnnxError as OnnxError  # noqa: PLC0414 - what this module raises
from service.formats.onnx.dependence import Dependence, Numbered, dependence, graphs_in
from service.formats.onnx.functions import FunctionError, inlined
from service.formats.onnx.halves import with_precision_told
from service.formats.onnx.inputs import (
    bounded_before,
    can_all_be_bounded,
    inputs_of,
    scores_only,
    with_one_input,
    with_real_inputs,
    without_maps,
)
from service.formats.onnx.operators import OPERATORS, advice
from service.formats.onnx.rounds import SEQUENCES, is_counted
from service.formats.onnx_pools import ONLY_PADDING, pools_of_padding
from service.formats.protobuf import has_more_fields

_ZIP = b"PK\x03\x04"
Tensors = Callable[[onnx.ModelProto], Iterator[tuple[str, TensorProto]]]
"""Every tensor of a model, with words for its place."""


def _joined(
    content: bytes, most: int, read_model: Callable[[bytes], onnx.ModelProto], tensors: Tensors
) -> onnx.ModelProto:
    """Return the model of a zip, with all weights in it. Raises :class:`ArchiveError`.

    The weights are looked for beside the model only: a path in it is never followed.
    """
    with members_of_zip(content) as members:
        models = [member for member in members if member.path.suffix == ".onnx"]
        if len(models) != 1:
            if (found := mistaken_archive(member.name for member in members)) is not None:
                raise ArchiveError(f"the file is not an ONNX model: it {found}")
            raise ArchiveError(
                f"the archive has {len(models)} .onnx files; expected one, with the files of its weights"
            )
        home = models[0].path.parent
        beside = [member for member in members if member.path.parent == home]
        if sum(member.size for member in beside) > most:
            raise ArchiveError(f"the archive unpacks to more than {most} bytes")
        files = {member.name: _read(member) for member in beside}
    model = read_model(files.pop(models[0].name))
    for where, tensor in tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            _take_in(where, tensor, files)
    return model


def _take_in(where: str, tensor: TensorProto, files: Mapping[str, bytes]) -> None:
    """Put the bytes of a tensor into it."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    name = PurePosixPath(told.get("location", "")).name
    if name not in files:
        raise ArchiveError(f"{where} is kept in {name[:60]!r}, which is not beside the model in the archive")
    try:
        start = int(told.get("offset", 0))
        length = int(told.get("length", len(files[name]) - start))
    except ValueError as error:
        raise ArchiveError(f"{where} has a place in {name[:60]!r} that is no number") from error
    if start < 0 or length < 0 or start + length > len(files[name]):
        raise ArchiveError(f"{where} lies beyond the end of {name[:60]!r}")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT
    tensor.raw_data = files[name][start : start + length]


def _read(member: ArchiveMember) -> bytes:
    with member.open() as content:
        return content.read(member.size)


OPSETS = range(8, 25)
INNER = (
    "a graph within it depends on the input; supported are an If whose condition is a constant, and a Loop or Scan "
    "whose number of rounds is"
)
MOST_ENTRIES = 2**24
"""The most entries of a model's input, and of an output, for a batch of one."""
LARGEST, LARGEST_READ = 2**31, 2**28
"""The most bytes of a model, by protobuf's limit, and of a model that is read to check a spec: only ranks read larger
ones.
"""
MOST_FIELDS = 2**20
"""The most fields of a model's protobuf message and of all messages within it; the numbers of a tensor count as one."""


class _TooLargeError(OnnxError):
    """The model unpacks to more than may be read here."""


@dataclass(frozen=True)
class Outline:
    """Entries of one instance, and nodes that no rule bounds.

    ``outputs`` is ``None`` if only a run tells. ``names`` are those of the outputs, and ``instead`` values that can
    be bounded, on which such nodes depend. With ``has_labels``, some outputs that can be bounded are left out as
    labels; ``every`` counts the entries of all outputs. ``shape`` is that of the input at a batch of one, if more than
    one of its axes is longer than 1.
    """

    inputs: int
    outputs: int | None
    unsupported: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    has_labels: bool = False
    every: int | None = None
    shape: tuple[int, ...] | None = None


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
    return scores_only(model, _dependence(model), _supported(model))


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
        model = without_maps(inlined(model))
    except FunctionError as error:
        raise OnnxError(str(error)) from error
    model = with_real_inputs(with_precision_told(model))
    _check_inputs(model)
    model = with_one_input(model, opset, batch_of_one)
    batch_of_one(graph_input(model))
    for output in model.graph.output:
        _lengths(output)
    return model


def message_of(content: bytes) -> onnx.ModelProto:
    """Return the file's model unchanged, with the weights of a zip in their places. Raises :class:`OnnxError`."""
    try:
        model = _joined(content, LARGEST, _message, tensors_in) if content.startswith(_ZIP) else _message(content)
    except ArchiveError as error:
        raise OnnxError(str(error)) from error
    check_texts(model)
    return model


def _message(content: bytes) -> onnx.ModelProto:
    if (found := mistaken_for_model(content)) is not None:
        raise OnnxError(f"the file is not an ONNX model: it {found}")
    if has_more_fields(content, onnx.ModelProto.DESCRIPTOR, MOST_FIELDS):
        raise OnnxError(f"the file has more than {MOST_FIELDS} fields (nodes, attributes, lengths of shapes …)")
    try:
        return onnx.load_from_string(content)
    except MemoryError:
        raise
    except Exception as error:  # protobuf's error type differs by its implementation
        raise OnnxError(f"the file is not an ONNX model: {first_line(error)}") from error


def unpacked(data: bytes, most: int) -> bytes:
    """Return the data, decompressed if gzip compressed it. Raises :class:`OnnxError`, also beyond ``most`` bytes."""
    try:
        found = Unpacking(len(data)).read(data, "the file", most)
    except UploadError as error:
        raise OnnxError(str(error)) from error
    if len(found) > most:
        raise _TooLargeError(f"the file unpacks to more than {most} bytes")
    return found


def opset_of(model: onnx.ModelProto) -> int:
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def graph_input(model: onnx.ModelProto) -> onnx.ValueInfoProto:
    """Return the one input of a model; a tensor of floating-point numbers."""
    return inputs_of(model)[0]


def _check_inputs(model: onnx.ModelProto) -> None:
    found = inputs_of(model)
    if not found:
        raise OnnxError("the model has no inputs; expected one or more")
    first = found[0].type.tensor_type.elem_type
    for value in found:
        kind = value.type.tensor_type.elem_type
        if kind not in FLOATS:
            expected = "a tensor of numbers, or a fixed one (model.inputs)"
            raise OnnxError(f"input {value.name!r} is {type_name(kind)}; expected {expected}")
        if kind != first:
            expected = f"{type_name(first)}, as {found[0].name!r} is"
            raise OnnxError(f"input {value.name!r} is {type_name(kind)}; expected {expected}")


def batch_of_one(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Return the input's shape; only its first dimension may be open."""
    lengths = _lengths(value)
    if any(length < 1 for length in lengths[1:]):
        named = open_lengths(value)
        shown = ", ".join(named.get(place, str(length)) for place, length in enumerate(lengths))
        left = ", ".join(name for place, name in named.items() if place)
        raise OnnxError(
            f"input {value.name!r} has shape ({shown}): only its first length may be open; model.dimensions sets {left}"
        )
    return tuple(max(length, 1) for length in lengths)


def open_lengths(value: onnx.ValueInfoProto) -> dict[int, str]:
    """Return the names of the lengths that the file leaves open, by their places."""
    dims = enumerate(value.type.tensor_type.shape.dim)
    return {place: dim.dim_param or f"{value.name}.{place}" for place, dim in dims if dim.dim_value < 1}


def outline(path: Path, chosen: Callable[[bytes], bytes] = bytes) -> Outline | None:
    """Return the outline of the model that ``chosen`` makes of an uploaded file; ``None`` if the file is large.
    Raises :class:`OnnxError`.
    """
    if path.stat().st_size > LARGEST_READ:
        return None
    try:
        return outline_of(chosen(unpacked(path.read_bytes(), LARGEST_READ)))
    except _TooLargeError:
        return None


def outline_of(content: bytes) -> Outline:
    """Return the outline of the model in a file's content that gzip did not compress. Raises :class:`OnnxError`."""
    model = _with_every_output(content)
    every = _entries_of_outputs(model)
    are_bounded = can_all_be_bounded(model, _dependence(model), _supported(model))
    count = len(model.graph.output)
    model = scores_only(model, _dependence(model), _supported(model))
    shape = batch_of_one(graph_input(model))
    supported = _supported(model)
    working = working_nodes(model)
    unsupported = tuple(
        f"ONNX {operator_of(node)} (node {name_of(node, index)!r})"
        + (f", as {INNER}" if any(graphs_in(node)) else advice(operator_of(node), node.input))
        for index, node in working
        if index not in supported
    )
    unsupported += tuple(
        f"ONNX {operator_of(model.graph.node[index])} (node {name_of(model.graph.node[index], index)!r}), as "
        f"{ONLY_PADDING}"
        for index in pools_of_padding(model, working)
    )
    return Outline(
        prod(shape),
        _entries_of_outputs(model),
        unsupported,
        tuple(output.name for output in model.graph.output),
        bounded_before([each for each in working if each[0] not in supported], _dependence(model), supported),
        are_bounded and len(model.graph.output) < count,
        every,
        shape if sum(length > 1 for length in shape) > 1 else None,
    )


def working_nodes(model: onnx.ModelProto) -> list[Numbered]:
    """Return the nodes, with their numbers, that depend on the input's values and that an output needs, in an order
    of execution.
    """
    return _dependence(model).needed([output.name for output in model.graph.output])


def constant_conditions(model: onnx.ModelProto) -> dict[int, onnx.NodeProto]:
    """Return every ``If``, by its number, whose condition does not depend on the input's values."""
    values = _dependence(model).values
    return {
        index: node
        for index, node in enumerate(model.graph.node)
        if operator_of(node) == "If" and node.input[0] not in values
    }


def _supported(model: onnx.ModelProto) -> set[int]:
    """Return the numbers of the nodes that can be bounded, or that a branch replaces."""
    written = OPERATORS | SEQUENCES
    known = {
        index
        for index, node in enumerate(model.graph.node)
        if operator_of(node) in written and not _is_of_whole_numbers(node)
    }
    return known | constant_conditions(model).keys() | counted_loops(model).keys()


def _is_of_whole_numbers(node: onnx.NodeProto) -> bool:
    return node.op_type == "Mod" and not any(each.name == "fmod" and each.i for each in node.attribute)


def counted_loops(model: onnx.ModelProto) -> dict[int, onnx.NodeProto]:
    """Return every ``Loop`` and ``Scan``, by its number, whose number of rounds is a constant."""
    found = depending(model)
    return {index: node for index, node in enumerate(model.graph.node) if is_counted(node, found.values, found.varying)}


def depending(model: onnx.ModelProto) -> Dependence:
    """Return the dependence on the input's values."""
    return _dependence(model)


def _dependence(model: onnx.ModelProto) -> Dependence:
    return dependence(model.graph, graph_input(model).name, OPERATORS)


def operator_of(node: onnx.NodeProto) -> str:
    """Return a node's operator, with its domain if that is not ONNX's own."""
    kind: str = node.op_type
    return kind if node.domain in ("", "ai.onnx") else f"{node.domain}.{kind}"


def _entries_of_outputs(model: onnx.ModelProto) -> int | None:
    """Return the entries of all outputs together, if the file declares them."""
    outputs = [_entries(value) for value in model.graph.output]
    known = [each for each in outputs if each is not None]
    return sum(known) if len(known) == len(outputs) else None


def _entries(value: onnx.ValueInfoProto) -> int | None:
    """Return the number of entries of one instance, if the file declares every length but the first."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    lengths = _lengths(value)
    return None if any(length < 1 for length in lengths[1:]) else prod(max(length, 1) for length in lengths)


def _lengths(value: onnx.ValueInfoProto) -> list[int]:
    """Return the lengths. Raises :class:`OnnxError` if their product exceeds that of any model."""
    lengths = [int(dim.dim_value) for dim in value.type.tensor_type.shape.dim]
    entries = 1
    for length in lengths:
        entries *= max(length, 1)
        if entries > MOST_ENTRIES:
            raise OnnxError(f"{value.name!r} has shape {lengths[:8]}; at most {MOST_ENTRIES} entries are supported")
    return lengths


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
