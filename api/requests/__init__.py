"""Reads what a request says, and refuses it in one form: RFC 9457 problem details."""

from api.requests.body import KeptBody
from api.requests.error_paths import Locator
from api.requests.params import (
    After,
    IdempotencyKey,
    JobIds,
    Limit,
    Moment,
    NeedsFilter,
    PageCursor,
    SweepFilter,
    TargetProject,
    Types,
    refuse,
    refused_key,
    resume_point,
    split_ids,
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
    "TargetProject",
    "Types",
    "from_refusals",
    "from_spec",
    "from_validation",
    "invalid",
    "loads",
    "refuse",
    "refused_key",
    "respond",
    "resume_point",
    "several_of",
    "split_ids",
    "stream_id",
    "summary",
    "wants_stream",
]
