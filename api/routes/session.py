"""Signing in and out: a browser trades an API key for a session, and keeps no key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from api.context import StoreDep
from api.problems import ProblemError
from api.security import Reader, cookie_name, refuse_cross_site, session_cookie

router = APIRouter(tags=["session"], include_in_schema=False)


class SignedIn(BaseModel):
    session: str
    """What the pages of this origin send in the header ``X-Trivet-Session``; the cookie alone admits nobody."""


class Ticket(BaseModel):
    ticket: str
    """What admits the session to one path as the query's ``ticket``, for links and event streams."""


@router.post("/login")
def login(
    request: Request, response: Response, store: StoreDep, key: Annotated[str, Form(min_length=1, max_length=200)]
) -> SignedIn:
    """Begin a session of ``key``. A wrong key: 401; after many of them from one address, 429."""
    refuse_cross_site(request)
    address = request.client.host if request.client else "unknown"
    if wait_s := store.sign_ins.wait_s(address):
        detail = f"too many refused sign-ins from this address; try again in {wait_s} s"
        raise ProblemError(429, detail, headers={"Retry-After": str(wait_s)})
    found = store.keys.verify(key.strip())
    if found is None:
        store.sign_ins.refused(address)
        raise ProblemError(401, "this API key is not valid, or was revoked")
    if (former := session_cookie(request)) is not None:
        store.sessions.end(former)
    made = store.sessions.begin(found)
    response.set_cookie(
        cookie_name(request),
        made.cookie,
        max_age=round(store.sessions.longest_s),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return SignedIn(session=made.page)


@router.post("/logout")
def logout(request: Request, store: StoreDep) -> Response:
    """End the session: its cookie admits nobody from now on, and its open streams end."""
    refuse_cross_site(request)
    if (session := session_cookie(request)) is not None:
        store.sessions.end(session)
    response = (
        RedirectResponse("/login", status_code=303)
        if "text/html" in request.headers.get("accept", "")
        else Response(status_code=204)
    )
    response.delete_cookie(cookie_name(request), httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return response


@router.post("/tickets")
def ticket(request: Request, key: Reader, store: StoreDep, path: Annotated[str, Form(max_length=4000)]) -> Ticket:
    """Admit the session to ``path``, as it stands in a request line, without the header."""
    session = session_cookie(request)
    if session is None or not key.credential.session:
        raise ProblemError(403, "only a session needs tickets; send the API key as 'Authorization: Bearer tvt_…'")
    return Ticket(ticket=store.sessions.ticket(session, path))
