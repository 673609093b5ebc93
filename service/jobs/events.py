"""What a job reports while it runs, in the form that travels from a rank to the API.

A rank writes one JSON object a line to its supervisor's socket; the supervisor relays batches into the job's
stream, fenced by the attempt number. Every event has ``type``, ``time`` (Unix seconds, float) and ``rank``
(``None`` for the service itself); the other fields depend on the type.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, get_args

EventType = Literal["state", "metric", "bound", "search", "span", "log", "artifact", "progress", "error"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)


class Event(TypedDict):
    """Fields common to all events."""

    type: EventType
    time: float
    rank: int | None


class StateEvent(Event):
    state: str
    attempt: int
    reason: NotRequired[str]


class MetricEvent(Event):
    """Values of one step; names as in the interface (``loss``, ``tokens_per_s``, …)."""

    step: int
    values: dict[str, float]


class BoundEvent(Event):
    """One instance of a verification job; ``reason`` is why it is undecided. Outputs are those at the counterexample:
    the model's own in float64, and onnxruntime's of a model from ONNX; ``None`` for one that is not finite.
    """

    instance: int
    name: str | None
    label: NotRequired[int | None]
    prediction: NotRequired[int | None]
    verdict: Literal["verified", "falsified", "unknown", "timeout"]
    lower: list[float]
    upper: list[float]
    margin: float | None
    method: str
    decided_by: str | None
    reason: NotRequired[str | None]
    seconds: float
    domains: int
    counterexample: list[float] | None
    counterexample_outputs: NotRequired[list[float | None] | None]
    onnxruntime_outputs: NotRequired[list[float | None] | None]


class SearchEvent(Event):
    """A moment of the search for one instance's verdict: subdomains bounded so far and still open, and the least
    margin that is proved over all of them (``None`` where nothing is), ``seconds`` since it began.
    """

    instance: int
    domains: int
    open: int
    bound: float | None
    seconds: float


class SpanEvent(Event):
    """A timed piece of work, for timelines; ``start`` and ``end`` in Unix seconds."""

    name: str
    start: float
    end: float
    detail: NotRequired[dict[str, Any]]


class LogEvent(Event):
    stream: Literal["stdout", "stderr", "service"]
    line: str


class ArtifactEvent(Event):
    """A file in the job's artifact folder; the supervisor adds ``bytes`` and ``sha256``."""

    name: str
    media_type: str
    bytes: NotRequired[int]
    sha256: NotRequired[str]


class ProgressEvent(Event):
    """Fields as those of :class:`service.jobs.records.Progress`."""

    done: int
    total: int
    unit: str
    share: NotRequired[float | None]
    phase: NotRequired[str | None]
    left_s: NotRequired[float | None]


class ErrorEvent(Event):
    """The exception that ended a rank; ``error`` is its class name, ``traceback`` empty where it would tell nothing."""

    error: str
    message: str
    traceback: str
