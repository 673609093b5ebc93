"""Defines what a running job reports, and keeps its record on disk.

``event`` has the forms, ``bounds_row`` a verification's row, ``record_files`` the record of an attempt, ``rank_words``
how it is read within limits, ``packed`` the small record of a job that succeeded, ``levels`` how bad a printed line is.
``curves``, thinned ones beside a record, is imported by its own name: it needs pydantic.
"""

from service.jobs.events.bounds_row import ROW_VERDICTS, BoundsRow
from service.jobs.events.event import (
    EVENT_TYPES,
    LATEST,
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    LONGEST_WORDS,
    RECORDED_ONLY,
    STREAM_PING_S,
    ArtifactEvent,
    ErrorEvent,
    Event,
    EventType,
    LogEvent,
    MalformedEvent,
    MetricEvent,
    PhaseEvent,
    ProgressEvent,
    bounded_error,
    event_key,
    parse_event,
    parse_object,
)
from service.jobs.events.levels import Level, LineFilter, is_at_least
from service.jobs.events.packed import PACKED, pack, unpack
from service.jobs.events.rank_words import LONGEST_EVENT, Check, OddWord, go_on, read_object
from service.jobs.events.record_files import (
    EventReader,
    EventWriter,
    attempt_folders,
    host_file,
    log_file,
    log_segment,
    newest_logged,
    rank_file,
    recorded,
    unread_words,
)

__all__ = [
    "EVENT_TYPES",
    "LATEST",
    "LONGEST_EVENT",
    "LONGEST_MESSAGE",
    "LONGEST_TRACEBACK",
    "LONGEST_WORDS",
    "PACKED",
    "RECORDED_ONLY",
    "ROW_VERDICTS",
    "STREAM_PING_S",
    "ArtifactEvent",
    "BoundsRow",
    "Check",
    "ErrorEvent",
    "Event",
    "EventReader",
    "EventType",
    "EventWriter",
    "Level",
    "LineFilter",
    "LogEvent",
    "MalformedEvent",
    "MetricEvent",
    "OddWord",
    "PhaseEvent",
    "ProgressEvent",
    "attempt_folders",
    "bounded_error",
    "event_key",
    "go_on",
    "host_file",
    "is_at_least",
    "log_file",
    "log_segment",
    "newest_logged",
    "pack",
    "parse_event",
    "parse_object",
    "rank_file",
    "read_object",
    "recorded",
    "unpack",
    "unread_words",
]
