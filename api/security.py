"""Finds out who asks, and what they may do.

Every route below ``/v1`` requires an API key as ``Authorization: Bearer``, or a session of the dashboard: its cookie,
and what proves that a page of this very origin asks.
Scopes contain each other: ``admin`` includes ``submit``, which includes ``read``. A key with ``submit`` changes only
its own jobs; ``admin`` changes all.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes

from api.context import StoreDep
from api.problems import ProblemError
from service.jobs.records import ApiKey, Job, Scope
from service.jobs.store import Credential, Store

SESSION_COOKIE = "trivet_session"
"""HttpOnly and SameSite=Strict; over TLS with the prefix ``__Host-``. Browsers send it to every port of the host."""
PAGE_HEADER = "X-Trivet-Session"
"""The session's other secret, which only pages of this origin, port included, can know."""
_CSRF_HEADER = "X-Trivet"
"""Sent by scripts, since other sites' pages cannot send it."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_IMPLIED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset({"admin", "submit", "read"}),
    "submit": frozenset({"submit", "read"}),
    "read": frozenset({"read"}),
}

_bearer = HTTPBearer(auto_error=False, description="an API key, tvt_…")
_cookie = APIKeyCookie(name=SESSION_COOKIE, auto_error=False, description="the dashboard's session")


class Caller(ApiKey):
    """Identifies who sent a request: its key, and what spoke for it."""

    credential: Credential


def granted(key: ApiKey) -> frozenset[Scope]:
    """Return all scopes of a key, with those that they include."""
    return frozenset[Scope]().union(*(_IMPLIED[scope] for scope in key.scopes))


def authenticated(
    request: Request,
    scopes: SecurityScopes,
    store: StoreDep,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    _: Annotated[str | None, Depends(_cookie)],
) -> Caller:
    """Return the key of this request; 401 without a valid one, 403 when it lacks a scope."""
    if bearer is not None:
        caller = _by_key(store, bearer.credentials)
    elif (session := session_cookie(request)) is not None:
        caller = _by_session(request, store, session)
    else:
        raise _unauthorized("an API key is needed: send 'Authorization: Bearer tvt_…'")
    missing = [scope for scope in scopes.scopes if scope not in granted(caller)]
    if missing:
        raise ProblemError(
            403, f"this needs a key with scope '{missing[-1]}'; yours has: {', '.join(caller.scopes) or 'none'}"
        )
    return caller


def _by_key(store: Store, secret: str) -> Caller:
    key = store.keys.verify(secret)
    if key is None:
        raise _unauthorized("this API key is not valid, or was revoked")
    return Caller(**key.model_dump(), credential=Credential(key.id))


def _by_session(request: Request, store: Store, session: str) -> Caller:
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ProblemError(403, "a session speaks only for pages of this service's own address and port")
    refuse_cross_site(request)
    reads = request.method in _SAFE_METHODS
    key = store.sessions.resume(
        session,
        page=request.headers.get(PAGE_HEADER, ""),
        ticket=request.query_params.get("ticket", "") if reads else "",
        path=request.scope["raw_path"].decode("latin-1"),
    )
    if key is None:
        raise _unauthorized(f"the session is over, or this is none of its pages: they send '{PAGE_HEADER}'; sign in")
    return Caller(**key.model_dump(), credential=store.sessions.credential(key, session))


def cookie_name(request: Request) -> str:
    """Return the session cookie's name; the prefix makes browsers refuse one that another site or plain HTTP set."""
    return f"__Host-{SESSION_COOKIE}" if request.url.scheme == "https" else SESSION_COOKIE


def session_cookie(request: Request) -> str | None:
    return request.cookies.get(cookie_name(request))


def refuse_cross_site(request: Request) -> None:
    """Refuse an unsafe request that a browser may have been talked into by another site, or by another port's page."""
    if request.method in _SAFE_METHODS or _same_origin(request):
        return
    raise ProblemError(403, f"ask from this service's own pages; a script sends the header '{_CSRF_HEADER}: 1'")


def _same_origin(request: Request) -> bool:
    """Return whether one of our own pages sent this, by what every browser says; or else a script, by its header."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site == "same-origin"
    if origin is not None:
        return origin.lower().partition("://")[2] == request.headers.get("host", "").lower()
    return _CSRF_HEADER in request.headers


def require_owner(key: ApiKey, job: Job) -> None:
    """Refuse a change of a job to all but its owner and admins."""
    if job.owner != key.name and "admin" not in granted(key):
        raise ProblemError(403, f"job {job.id} belongs to '{job.owner}'; only its owner or an admin may change it")


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, detail, headers={"WWW-Authenticate": 'Bearer realm="trivet"'})


Reader = Annotated[Caller, Security(authenticated, scopes=["read"])]
Submitter = Annotated[Caller, Security(authenticated, scopes=["submit"])]
Admin = Annotated[Caller, Security(authenticated, scopes=["admin"])]
