"""Writes event files for TensorBoard, without its packages: they need a server and gRPC, and torch's writer needs
torch.

The format: records of TFRecord (https://www.tensorflow.org/tutorials/load_data/tfrecord), each a protobuf ``Event``
(tensorflow/core/util/event.proto) with a ``Summary`` (tensorflow/core/framework/summary.proto).
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from api.exports.base import ExportedJob
from api.exports.server import ExportServer
from service.jobs.files import atomic_draft

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_STRING = 7
"""DT_STRING of tensorflow/core/framework/types.proto."""


class TensorBoardExporter:
    """Writes a folder for each job: metrics and results as scalars, spec and facts as text."""

    def export(self, told: ExportedJob, server: ExportServer | None) -> str:
        folder = told.data.tensorboard / told.job.id
        folder.parent.mkdir(exist_ok=True)
        with atomic_draft(folder) as draft:
            draft.mkdir()
            _write_events(draft / f"events.out.tfevents.{_end_time(told):.0f}.trivet", told)
        return str(folder)


def _write_events(path: Path, told: ExportedJob) -> None:
    """Write one event file with everything about a job."""
    with path.open("wb") as file:
        for event in chain([_event(_end_time(told), 0, _text_field(3, "brain.Event:2"))], _texts(told), _scalars(told)):
            file.write(_record(event))


def _scalars(told: ExportedJob) -> Iterator[bytes]:
    """Yield an event for each step with all of its metrics, then one for the results."""
    steps: dict[int, list[bytes]] = defaultdict(list)
    times: dict[int, float] = {}
    for name, points in told.metrics().items():
        for step, (when, value) in points.items():
            steps[step].append(_scalar(name, float("nan") if value is None else value))
            times[step] = max(when, times.get(step, when))
    for step in sorted(steps):
        yield _event(times[step], step, _field(5, b"".join(steps[step])))
    if results := told.results():
        values = b"".join(_scalar(f"result/{name}", value) for name, value in results.items())
        yield _event(_end_time(told), max(steps, default=0), _field(5, values))


def _texts(told: ExportedJob) -> Iterator[bytes]:
    facts = told.facts() | {f"result.{name}": value for name, value in told.findings().items()}
    for name, what in (("spec", told.job.spec), ("facts", facts)):
        yield _event(_end_time(told), 0, _field(5, _text(name, _indented(what))))


def _indented(value: object) -> str:
    """Return JSON as a code block in Markdown, in which TensorBoard shows text."""
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=2, ensure_ascii=False).splitlines())


def _end_time(told: ExportedJob) -> float:
    return (told.job.ended_at or told.job.created_at).timestamp()


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
