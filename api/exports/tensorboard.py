"""Writes event files for TensorBoard, without its packages: they need a server and gRPC, and torch's writer needs
torch.

The format: records of TFRecord (https://www.tensorflow.org/tutorials/load_data/tfrecord), each a protobuf ``Event``
(tensorflow/core/util/event.proto) with a ``Summary`` (tensorflow/core/framework/summary.proto).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from api.exports.base import ExportedJob, Exporter, RunGoneError, by_step
from api.exports.server import ExportServer
from api.routes.metrics import Points
from service.jobs.files import atomic_draft

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_STRING = 7
"""DT_STRING of tensorflow/core/framework/types.proto."""


class TensorBoardExporter(Exporter):
    """Writes a folder for each job: metrics and results as scalars, spec and facts as text."""

    def begin(self, told: ExportedJob, server: ExportServer | None) -> str:
        folder = _folder(told)
        folder.parent.mkdir(exist_ok=True)
        with atomic_draft(folder) as draft:
            draft.mkdir()
            path = draft / f"events.out.tfevents.{told.now:.0f}.trivet"
            with path.open("xb") as file:
                file.write(_records([_event(told.now, 0, _text_field(3, "brain.Event:2")), _told(told, "spec")]))
                return f"{path.name}:{file.tell()}"

    def send(self, told: ExportedJob, server: ExportServer | None, mark: str, points: Mapping[str, Points]) -> str:
        return _append(told, mark, _scalars(points))

    def end(self, told: ExportedJob, server: ExportServer | None, mark: str) -> str:
        events = [_told(told, "facts")]
        if results := told.results():
            values = b"".join(_scalar(f"result/{name}", value) for name, value in results.items())
            events.append(_event(told.now, told.last_step, _field(5, values)))
        _append(told, mark, events)
        return str(_folder(told))


def _folder(told: ExportedJob) -> Path:
    return told.data.tensorboard / told.job.id


def _append(told: ExportedJob, mark: str, events: Iterable[bytes]) -> str:
    """Write events at the mark, over what a process may have left behind it that did not live to note it."""
    name, _, size = mark.rpartition(":")
    path = _folder(told) / name
    try:
        file = path.open("r+b")
    except FileNotFoundError as error:
        raise RunGoneError(f"{path} is gone") from error
    with file:
        if file.seek(0, os.SEEK_END) < int(size):
            raise RunGoneError(f"{path} is shorter than it was")
        file.truncate(int(size))
        file.seek(0, os.SEEK_END)
        file.write(_records(events))
        return f"{name}:{file.tell()}"


def _records(events: Iterable[bytes]) -> bytes:
    return b"".join(map(_record, events))


def _scalars(points: Mapping[str, Points]) -> Iterator[bytes]:
    """Yield an event for each step with all of its metrics."""
    for step, when, values in by_step(points):
        scalars = (_scalar(name, float("nan") if value is None else value) for name, value in values.items())
        yield _event(when, step, _field(5, b"".join(scalars)))


def _told(told: ExportedJob, name: Literal["spec", "facts"]) -> bytes:
    """Return an event with a text: the spec, which is there from the first, or what an ended job came to."""
    results = {f"result.{each}": value for each, value in told.findings().items()}
    what = told.job.spec if name == "spec" else told.facts() | results
    return _event(told.now, 0, _field(5, _text(name, _indented(what))))


def _indented(value: object) -> str:
    """Return JSON as a code block in Markdown, in which TensorBoard shows text."""
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=2, ensure_ascii=False).splitlines())


def _event(time: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + what


def _scalar(name: str, value: float) -> bytes:
    return _field(1, _text_field(1, name) + b"\x15" + struct.pack("<f", _narrow(value)))


def _text(name: str, text: str) -> bytes:
    """Return a value of the plugin for text: a tensor of one string."""
    plugin = _field(9, _field(1, _text_field(1, "text")))
    tensor = _field(8, b"\x08" + _varint(_STRING) + _field(2, _field(2, b"\x08\x01")) + _text_field(8, text))
    return _field(1, _text_field(1, name) + tensor + plugin)


def _narrow(value: float) -> float:
    """Return the value as float32: a number that is too large becomes infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _text_field(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Return a protobuf integer; negative ones have 64 bits."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    """Return the masked CRC-32C (Castagnoli) of TFRecord."""
    found = 0xFFFFFFFF
    for byte in content:
        found = _TABLE[(found ^ byte) & 0xFF] ^ found >> 8
    found ^= 0xFFFFFFFF
    return struct.pack("<I", ((found >> 15 | found << 17) + _MASK) & 0xFFFFFFFF)


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_entry, range(256)))
