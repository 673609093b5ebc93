"""Reads what a request says, and refuses it in one form: RFC 9457 problem details."""

from api.requests.body import KeptBody
from api.requests.error_paths import Locator
from api.requests.params import (
    TICKET,
    After,
    IdempotencyKey,
    JobIds,
    Limit,
    Moment,
    NeedsFilter,
    PageCursor,
    SweepFilter,
    Types,
    refuse,
    refuse_ignored,
    refused_key,
    resume_point,
    split_names,
    stream_id,
    wants_stream,
)
from api.requests.problems import (
    MEDIA_TYPE,
    FieldError,
    ProblemDetails,
    ProblemError,
    from_refusals,
    from_validation,
    invalid,
    respond,
    summary,
)
from api.requests.several import several_of
from api.requests.strict_json import StrictRoute, loads
from api.requests.sweeps import from_spec

__all__ = [
    "MEDIA_TYPE",
    "TICKET",
    "After",
    "FieldError",
    "IdempotencyKey",
    "JobIds",
    "KeptBody",
    "Limit",
    "Locator",
    "Moment",
    "NeedsFilter",
    "PageCursor",
    "ProblemDetails",
    "ProblemError",
    "StrictRoute",
    "SweepFilter",
    "Types",
    "from_refusals",
    "from_spec",
    "from_validation",
    "invalid",
    "loads",
    "refuse",
    "refuse_ignored",
    "refused_key",
    "respond",
    "resume_point",
    "several_of",
    "split_names",
    "stream_id",
    "summary",
    "wants_stream",
]
