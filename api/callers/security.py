"""Authenticates callers and decides what they may do.

Every route below ``/v1`` requires an API key as ``Authorization: Bearer``, or a session of the dashboard: its
cookie, and proof that a page of this origin asks. Scopes contain each other: ``admin`` includes ``submit``, which
includes ``read``. A key belongs to one project: with ``submit`` it changes only its owner's jobs there, with
``admin`` all jobs there. An admin key without a project is an operator's: it changes everything, and only it manages
the service.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope as ConnectionScope

from api.callers.audit_trail import audit_refusal, remember_caller
from api.callers.context import context_of
from api.requests import TICKET, ProblemError
from service.jobs.accounts import DEFAULT_PROJECT, Scope
from service.jobs.records import ApiKey
from service.jobs.store import Credential, Store, in_loop

SESSION_COOKIE = "trivet_session"
"""HttpOnly and SameSite=Strict; over TLS with the prefix ``__Host-``. Browsers send it to every port of the host."""
FLOW_COOKIE = "trivet_sign_in"
"""Ties a sign-in at a provider to the browser that began it."""
PAGE_HEADER = "X-Trivet-Session"
"""The session's other secret, which only pages of this origin, including the port, can know."""
UNSEEN_HEADER = "X-Trivet-Unseen"
"""The header of a page that nobody looks at: what it asks by itself does not keep a session alive."""
EXPIRY_HEADER = "X-Trivet-Key-Expires"
"""The header with the expiry of a request's key, once that is near."""
_WARN_BEFORE = timedelta(days=14)
_CSRF_HEADER = "X-Trivet"
"""The header that scripts send, since pages of other sites cannot."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_IMPLIED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset({"admin", "submit", "read"}),
    "submit": frozenset({"submit", "read"}),
    "read": frozenset({"read"}),
}

_BEARER = b"bearer "
_bearer = HTTPBearer(auto_error=False, description="an API key, tvt_…")
_cookie = APIKeyCookie(name=SESSION_COOKIE, auto_error=False, description="the dashboard's session")


class Caller(ApiKey):
    """The sender of a request: its key, and the session that used it."""

    credential: Credential

    @property
    def submits_to(self) -> str:
        """Return the project of a job or an upload that names none."""
        return self.project or DEFAULT_PROJECT


def granted(key: ApiKey) -> frozenset[Scope]:
    """Return all scopes of a key, with those that they include."""
    return frozenset[Scope]().union(*(_IMPLIED[scope] for scope in key.scopes))


async def authenticated(
    request: Request,
    scopes: SecurityScopes,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    _: Annotated[str | None, Depends(_cookie)],
) -> Caller:
    """Return the key of this request; 401 without a valid one, 403 if it lacks a scope. The key is looked up once."""
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None:
        caller = request.state.caller = await _admit_caller(request, bearer)
    missing = [scope for scope in scopes.scopes if scope not in granted(caller)]
    if missing:
        raise ProblemError(
            403, f"this needs a key with scope '{missing[-1]}'; yours has: {', '.join(caller.scopes) or 'none'}"
        )
    return caller


def only_secret(scope: ConnectionScope) -> str | None:
    """Return the request's key; ``None`` if it sends none, or more than one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
        return None
    return given[0][len(_BEARER) :].decode("latin-1") or None


def admit_ahead(scope: ConnectionScope, store: Store, needed: Scope) -> ApiKey | None:
    """Return the key of a request that :func:`authenticated` would admit; ``None`` for one that it may refuse."""
    key = store.keys.verify(only_secret(scope) or "")
    if key is None or needed not in granted(key):
        return None
    remember_caller(Request(scope), key, Credential(key.id))
    scope["state"]["key_expires"] = _near_end(key)
    return key


async def _admit_caller(request: Request, bearer: HTTPAuthorizationCredentials | None) -> Caller:
    store = context_of(request.app).store
    if bearer is not None:
        caller = await _by_key(request, store, bearer.credentials)
    elif (session := session_cookie(request)) is not None:
        caller = await in_loop(_by_session, request, store, session)
    else:
        raise _unauthorized("an API key is needed: send 'Authorization: Bearer tvt_…'")
    remember_caller(request, caller, caller.credential)
    request.state.key_expires = _near_end(caller)
    return caller


def _near_end(key: ApiKey) -> datetime | None:
    """Return when a key expires, if less than a fifth of its life and less than :data:`_WARN_BEFORE` is left."""
    if key.expires_at is None or key.holder == "person":
        return None
    warned_from = key.expires_at - min(_WARN_BEFORE, (key.expires_at - key.created_at) / 5)
    return key.expires_at if datetime.now(UTC) >= warned_from else None


async def _by_key(request: Request, store: Store, secret: str) -> Caller:
    key = await in_loop(store.keys.verify, secret)
    if key is None:
        await run_in_threadpool(audit_refusal, request, "key.refuse")
        raise _unauthorized("this API key is not valid, has expired, or was revoked")
    return Caller(**key.model_dump(), credential=Credential(key.id))


def _by_session(request: Request, store: Store, session: str) -> Caller:
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ProblemError(403, "a session serves only pages of this service's own address and port")
    refuse_cross_site(request)
    reads = request.method in _SAFE_METHODS
    key = store.sessions.resume(
        session,
        page=request.headers.get(PAGE_HEADER, ""),
        ticket=request.query_params.get(TICKET, "") if reads else "",
        path=request.scope["raw_path"].decode("latin-1"),
        is_use=UNSEEN_HEADER not in request.headers,
    )
    if key is None:
        raise _unauthorized(
            f"the session has ended, or this is not one of its pages: they send '{PAGE_HEADER}'; sign in"
        )
    return Caller(**key.model_dump(), credential=store.sessions.credential(key, session))


def cookie_name(request: Request) -> str:
    """Return the session cookie's name; the prefix makes browsers refuse one that another site or plain HTTP set."""
    return f"__Host-{SESSION_COOKIE}" if request.url.scheme == "https" else SESSION_COOKIE


def flow_cookie_name(request: Request) -> str:
    """Return the name of the cookie of a browser that signs in at a provider."""
    return f"__Host-{FLOW_COOKIE}" if request.url.scheme == "https" else FLOW_COOKIE


def session_cookie(request: Request) -> str | None:
    return request.cookies.get(cookie_name(request))


def refuse_cross_site(request: Request) -> None:
    """Refuse an unsafe request that another site, or a page of another port, may have made a browser send."""
    if request.method in _SAFE_METHODS or _same_origin(request):
        return
    raise ProblemError(403, f"ask from this service's own pages; a script sends the header '{_CSRF_HEADER}: 1'")


def _same_origin(request: Request) -> bool:
    """Return whether one of our own pages sent this, by headers that every browser sends, or a script, by its
    header.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site == "same-origin"
    if origin is not None:
        return origin.lower().partition("://")[2] == request.headers.get("host", "").lower()
    return _CSRF_HEADER in request.headers


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, detail, headers={"WWW-Authenticate": 'Bearer realm="trivet"'})


Reader = Annotated[Caller, Security(authenticated, scopes=["read"])]
Submitter = Annotated[Caller, Security(authenticated, scopes=["submit"])]


async def _operator(caller: Annotated[Caller, Security(authenticated, scopes=["admin"])]) -> Caller:
    if not caller.is_operator:
        detail = f"yours belongs to project '{caller.project}'"
        raise ProblemError(403, f"this needs a key with scope 'admin' and without a project; {detail}")
    return caller


Admin = Annotated[Caller, Depends(_operator)]
