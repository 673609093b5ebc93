"""ONNX models that keep their weights in files beside them, as exporters write them: a zip of the model and those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath

import onnx
from onnx import TensorProto

from service.formats.archive import ArchiveError, ArchiveMember, members_of_zip

_ZIP = b"PK\x03\x04"
Tensors = Callable[[onnx.ModelProto], Iterator[tuple[str, TensorProto]]]
"""Every tensor of a model, with words for where it is."""


def is_zip(content: bytes) -> bool:
    return content.startswith(_ZIP)


def joined(
    content: bytes, most: int, read_model: Callable[[bytes], onnx.ModelProto], tensors: Tensors
) -> onnx.ModelProto:
    """Return the model of a zip, with all weights in it. Raises :class:`ArchiveError`.

    The weights are looked for beside the model, and nowhere else: a path in it is never used as one.
    """
    with members_of_zip(content) as members:
        models = [member for member in members if member.path.suffix == ".onnx"]
        if len(models) != 1:
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
    """Put the bytes of a tensor where it is."""
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
