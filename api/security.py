"""Who asks, and what they may do.

Every route below ``/v1`` requires an API key: as ``Authorization: Bearer``, or in the dashboard's session cookie.
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

SESSION_COOKIE = "trivet_session"
"""Holds the API key of a browser session; HttpOnly and SameSite=Strict."""
CSRF_HEADER = "X-Trivet"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_IMPLIED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset({"admin", "submit", "read"}),
    "submit": frozenset({"submit", "read"}),
    "read": frozenset({"read"}),
}

_bearer = HTTPBearer(auto_error=False, description="an API key, tvt_…")
_cookie = APIKeyCookie(name=SESSION_COOKIE, auto_error=False, description="the dashboard's session")


def granted(key: ApiKey) -> frozenset[Scope]:
    """All scopes of a key, with those that they include."""
    return frozenset[Scope]().union(*(_IMPLIED[scope] for scope in key.scopes))


def authenticated(
    request: Request,
    scopes: SecurityScopes,
    store: StoreDep,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    cookie: Annotated[str | None, Depends(_cookie)],
) -> ApiKey:
    """The key of this request; 401 without a valid one, 403 when it lacks a scope."""
    if bearer is not None:
        secret = bearer.credentials
    elif cookie is not None:
        refuse_cross_site(request)
        secret = cookie
    else:
        raise _unauthorized("an API key is needed: send 'Authorization: Bearer tvt_…'")
    key = store.keys.verify(secret)
    if key is None:
        raise _unauthorized("this API key is not valid, or was revoked")
    missing = [scope for scope in scopes.scopes if scope not in granted(key)]
    if missing:
        raise ProblemError(
            403, f"this needs a key with scope '{missing[-1]}'; yours has: {', '.join(key.scopes) or 'none'}"
        )
    return key


def refuse_cross_site(request: Request) -> None:
    """Refuse an unsafe request that a browser may have been talked into by another site."""
    if request.method in _SAFE_METHODS or CSRF_HEADER in request.headers:
        return
    if not same_origin(request):
        raise ProblemError(
            403, f"with a session cookie, send the header '{CSRF_HEADER}: 1' or ask from the same origin"
        )


def same_origin(request: Request) -> bool:
    """Whether the browser says that one of our own pages sent this; ``False`` when it says nothing."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] == request.headers.get("host")


def require_owner(key: ApiKey, job: Job) -> None:
    """Only the owner of a job, or an admin, changes it."""
    if job.owner != key.name and "admin" not in granted(key):
        raise ProblemError(403, f"job {job.id} belongs to '{job.owner}'; only its owner or an admin may change it")


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, detail, headers={"WWW-Authenticate": 'Bearer realm="trivet"'})


Reader = Annotated[ApiKey, Security(authenticated, scopes=["read"])]
Submitter = Annotated[ApiKey, Security(authenticated, scopes=["submit"])]
Admin = Annotated[ApiKey, Security(authenticated, scopes=["admin"])]
