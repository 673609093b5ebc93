"""Records who did what: every route that changes something calls :func:`audit` once it is done.

``tests/api/test_api_audit.py`` calls each such route and fails for one that leaves no entry.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Request

from api.callers.context import context_of
from service.jobs.records import ApiKey
from service.jobs.records.audit import AuditAction, AuditRecord
from service.jobs.store import Credential

_SESSION_DIGITS = 16


def audit(
    request: Request, action: AuditAction, *, job: str | None = None, subject: str | None = None, **detail: str
) -> None:
    """Append an entry to the audit log: the caller of ``request`` did ``action``.

    Blocks for a write to the broker, so an asynchronous route calls it in a thread. Raises
    :class:`~service.jobs.store.StoreUnavailable`.
    """
    context_of(request.app).store.audit.append([_record(request, action, job, subject, detail)])


async def audit_submissions(request: Request, jobs: Iterable[str], **detail: str) -> None:
    """Append an entry for each job that ``request`` submitted, as :func:`audit` does, but without blocking."""
    records = [_record(request, "job.submit", job, None, detail) for job in jobs]
    await context_of(request.app).audit_queue.append(records)


def audit_refusal(request: Request, action: AuditAction, **detail: str) -> None:
    """Append the entry of a refused request. Only the first ones of a minute are recorded."""
    asked = {"method": request.method, "path": request.url.path, **detail}
    context_of(request.app).store.audit.refused(_record(request, action, None, None, asked))


def remember_caller(request: Request, caller: ApiKey, credential: Credential) -> None:
    """Keep the sender of this request for :func:`audit`."""
    request.state.audited = (caller, credential)


def _record(
    request: Request, action: AuditAction, job: str | None, subject: str | None, detail: dict[str, str]
) -> AuditRecord:
    caller: tuple[ApiKey, Credential] | tuple[None, None] = getattr(request.state, "audited", (None, None))
    key, credential = caller
    return AuditRecord(
        action=action,
        actor=key.name if key else "",
        key=key.id if key else "",
        session=credential.session[:_SESSION_DIGITS] if credential else "",
        address=request.client.host if request.client else "",
        job=job,
        subject=subject,
        detail=detail,
    )
