"""Reads the message of an ONNX file: out of gzip or a zip, with the weights that exporters write beside a model.

Such weights are looked for in the zip alone, where the model and all of them come as one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath

import onnx
from onnx import TensorProto

from service.formats.archive import ArchiveError, ArchiveMember, Unpacking, UploadError, members_of_zip
from service.formats.mistaken import mistaken_archive, mistaken_for_model
from service.formats.onnx.checks import check_texts, tensors_in
from service.formats.onnx.kinds import OnnxError, first_line
from service.formats.protobuf import has_more_fields

LARGEST, LARGEST_READ = 2**31, 2**28
"""The most bytes of a model, by protobuf's limit, and of one that is read to check a spec: ranks read larger ones."""
MOST_FIELDS = 2**20
"""The most fields of a model's protobuf message and of all messages within it; the numbers of a tensor count as one."""
_ZIP = b"PK\x03\x04"
Tensors = Callable[[onnx.ModelProto], Iterator[tuple[str, TensorProto]]]
"""Every tensor of a model, with words for its place."""


class TooLargeError(OnnxError):
    """The model unpacks to more than may be read here."""


def read_message(data: bytes) -> onnx.ModelProto:
    """Return the file's model unchanged, from content compressed by gzip or not; see :func:`message_of`."""
    return message_of(unpacked(data, LARGEST))


def unpacked(data: bytes, most: int) -> bytes:
    """Return the data, decompressed if gzip compressed it. Raises :class:`OnnxError`, also beyond ``most`` bytes."""
    try:
        found = Unpacking(len(data)).read(data, "the file", most)
    except UploadError as error:
        raise OnnxError(str(error)) from error
    if len(found) > most:
        raise TooLargeError(f"the file unpacks to more than {most} bytes")
    return found


def message_of(content: bytes) -> onnx.ModelProto:
    """Return the file's model unchanged, with the weights of a zip in their places. Raises :class:`OnnxError`."""
    try:
        model = _join_weights(content, LARGEST, _message, tensors_in) if content.startswith(_ZIP) else _message(content)
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


def _join_weights(
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
