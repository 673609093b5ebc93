"""Knows who calls: their key, what they may see and do, and what the audit log says of it.

``context`` gives handlers what lives as long as the application.
"""

from api.callers.access import (
    ChangeableJob,
    MaintainedProject,
    ReadableJob,
    ReadableProject,
    TargetProject,
    as_seen,
    visible_job,
    why_unchangeable,
)
from api.callers.audit_queue import AuditQueue
from api.callers.audit_trail import audit, audit_refusal, audit_submissions, remember_caller
from api.callers.context import CheckerDep, Context, ContextDep, HubDep, StoreDep, attach, context_of
from api.callers.security import (
    EXPIRY_HEADER,
    Admin,
    Caller,
    Reader,
    Submitter,
    admit_ahead,
    authenticated,
    cookie_name,
    flow_cookie_name,
    granted,
    only_secret,
    refuse_cross_site,
    session_cookie,
)
from api.callers.submissions import Submitting

__all__ = [
    "EXPIRY_HEADER",
    "Admin",
    "AuditQueue",
    "Caller",
    "ChangeableJob",
    "CheckerDep",
    "Context",
    "ContextDep",
    "HubDep",
    "MaintainedProject",
    "ReadableJob",
    "ReadableProject",
    "Reader",
    "StoreDep",
    "Submitter",
    "Submitting",
    "TargetProject",
    "admit_ahead",
    "as_seen",
    "attach",
    "audit",
    "audit_refusal",
    "audit_submissions",
    "authenticated",
    "context_of",
    "cookie_name",
    "flow_cookie_name",
    "granted",
    "only_secret",
    "refuse_cross_site",
    "remember_caller",
    "session_cookie",
    "visible_job",
    "why_unchangeable",
]
