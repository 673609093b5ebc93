"""Signs in and out: a browser trades an API key for a session, and keeps no key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from api.callers import (
    Reader,
    StoreDep,
    audit,
    audit_refusal,
    context_of,
    cookie_name,
    refuse_cross_site,
    remember_caller,
    session_cookie,
)
from api.requests import ProblemError
from service.jobs.records import ApiKey
from service.jobs.store import Credential, Store

router = APIRouter(tags=["session"], include_in_schema=False)


class SignedIn(BaseModel):
    session: str
    """The secret that pages of this origin send in the header ``X-Trivet-Session``; the cookie alone admits nobody."""


class Ticket(BaseModel):
    ticket: str
    """The query parameter ``ticket`` that admits the session to one path, for links and event streams."""


@router.post("/login")
def login(
    request: Request, response: Response, store: StoreDep, key: Annotated[str, Form(min_length=1, max_length=200)]
) -> SignedIn:
    """Begin a session of ``key``. A wrong key gets 401, and 429 after many from one address. A right key never
    does: many people may share an address, and one of them must not shut the others out.
    """
    refuse_cross_site(request)
    found = store.keys.verify(key.strip())
    if found is None:
        told = "this API key is not valid, has expired, or was revoked"
        raise sign_in_refused(request, store, told, reason="not a valid key")
    if found.holder == "account":
        remember_caller(request, found, Credential(found.id))
        raise ProblemError(403, f"the key is one of the service account '{found.name}', which begins no session")
    return begin_session(request, response, store, found)


def sign_in_refused(request: Request, store: Store, told: str, *, reason: str) -> ProblemError:
    """Return the answer to a failed sign-in, counted and recorded; an address that failed too often learns only
    that.
    """
    if wait_s := store.sign_ins.wait_s(_address(request)):
        detail = f"too many refused sign-ins from this address, and this one is wrong too; try again in {wait_s} s"
        return ProblemError(429, detail, headers={"Retry-After": str(wait_s)})
    store.sign_ins.refused(_address(request))
    context_of(request.app).monitor.meter.count("trivet_sign_ins_refused_total")
    audit_refusal(request, "sign_in.refuse", reason=reason)
    return ProblemError(401, told)


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def begin_session(request: Request, response: Response, store: Store, found: ApiKey) -> SignedIn:
    """Begin a session of a key, in place of the browser's former one; set its cookie and return its other secret."""
    _end_session(request, store)
    made = store.sessions.begin(found)
    remember_caller(request, found, store.sessions.credential(found, made.cookie))
    audit(request, "session.begin")
    set_cookie(request, response, cookie_name(request), made.cookie, round(store.sessions.longest_s))
    return SignedIn(session=made.page)


def set_cookie(request: Request, response: Response, name: str, value: str, max_age_s: int) -> None:
    """Set a cookie that neither scripts nor other sites may use."""
    secure = request.url.scheme == "https"
    response.set_cookie(name, value, max_age=max_age_s, httponly=True, samesite="strict", secure=secure)


@router.post("/logout")
def logout(request: Request, store: StoreDep) -> Response:
    """End the session: its cookie admits nobody any more, and its open streams end."""
    refuse_cross_site(request)
    _end_session(request, store)
    response = (
        RedirectResponse("/login", status_code=303)
        if "text/html" in request.headers.get("accept", "")
        else Response(status_code=204)
    )
    response.delete_cookie(cookie_name(request), httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return response


def _end_session(request: Request, store: Store) -> None:
    """End the browser's session, if it has one."""
    cookie = session_cookie(request)
    if cookie is not None and (key := store.sessions.end(cookie)) is not None:
        remember_caller(request, key, store.sessions.credential(key, cookie))
        audit(request, "session.end")


@router.post("/tickets")
def ticket(request: Request, key: Reader, store: StoreDep, path: Annotated[str, Form(max_length=4000)]) -> Ticket:
    """Admit the session to ``path``, as written in a request line, without the header."""
    session = session_cookie(request)
    if session is None or not key.credential.session:
        raise ProblemError(403, "only a session needs tickets; send the API key as 'Authorization: Bearer tvt_…'")
    return Ticket(ticket=store.sessions.ticket(session, path))
