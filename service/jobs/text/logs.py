"""Writes a process's log, without secrets: for people, or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from service.jobs.text.safe_text import SafeFormatter

LogFormat = Literal["text", "json"]
LogFields = MappingProxyType[str, str | int]

_NOTHING: LogFields = MappingProxyType({})
_context: ContextVar[LogFields] = ContextVar("log_fields", default=_NOTHING)

_HIDDEN = "***"
_SECRETS = (
    (re.compile(r"tvt_[A-Za-z0-9]+_[A-Za-z0-9_-]+"), f"tvt_{_HIDDEN}"),
    (re.compile(r"(://)[^/\s@'\"]*@"), rf"\1{_HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {_HIDDEN}"),
    (re.compile(r"(?i)\b((?:__host-)?trivet_session|ticket|requirepass|password)=[^;&\s'\"]+"), rf"\1={_HIDDEN}"),
    (
        re.compile(r"(?i)\b(set-cookie|cookie|authorization|x-trivet-session)(['\"]?\s*[:=]\s*['\"]?)[^\r\n'\"]+"),
        rf"\1\2{_HIDDEN}",
    ),
)
"""API keys, passwords in URLs and proofs of a session, by their form, wherever they stand."""


def redacted(text: str) -> str:
    """Return ``text`` with secrets replaced."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


@contextmanager
def log_fields(**fields: str | int) -> Iterator[None]:
    """Add fields, such as ``job``, to records logged within, in this thread and in tasks that begin here."""
    token = _context.set(MappingProxyType({**_context.get(), **fields}))
    try:
        yield
    finally:
        _context.reset(token)


def set_log_fields(**fields: str | int) -> None:
    """Add fields to the records of the rest of this task."""
    _context.set(MappingProxyType({**_context.get(), **fields}))


def log_field(name: str) -> str | None:
    value = _context.get().get(name)
    return None if value is None else str(value)


class RedactingFormatter(SafeFormatter):
    """Formats a record for people, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: ``time``, ``level``, ``logger``, ``message``, the fields of the process and
    of the task, and ``exception`` if there is one.
    """

    def __init__(self, fields: dict[str, str | int]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **self._fields,
            **_context.get(),
        }
        if record.exc_info:
            entry["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(entry)


def log_to_stderr(level: str, layout: str, form: LogFormat = "text", **fields: str | int) -> None:
    """Send the process's log to standard error: formatted by ``layout``, or as JSON with ``fields`` in each record."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(fields) if form == "json" else RedactingFormatter(layout))
    logging.basicConfig(level=level.upper(), handlers=[handler])
