"""The browser's session: a cookie that holds the API key, out of reach of scripts and of other sites."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from api.context import StoreDep
from api.problems import ProblemError
from api.security import CSRF_HEADER, SESSION_COOKIE, refuse_cross_site

router = APIRouter(tags=["session"], include_in_schema=False)

_MONTH_S = 30 * 24 * 3600


@router.post("/login")
def login(request: Request, store: StoreDep, key: Annotated[str, Form(min_length=1, max_length=200)]) -> Response:
    """Keep ``key`` in a session cookie and go to the dashboard. A wrong key: back to the form, or 401 to scripts;
    after many of them from one address, 429.
    """
    refuse_cross_site(request)
    address = request.client.host if request.client else "unknown"
    if wait_s := store.sign_ins.wait_s(address):
        return _too_often(request, wait_s)
    if store.keys.verify(key.strip()) is None:
        store.sign_ins.refused(address)
        if _is_page(request):
            return RedirectResponse("/login?refused=key", status_code=303)
        raise ProblemError(401, "this API key is not valid, or was revoked")
    response = _to("/", request)
    response.set_cookie(
        SESSION_COOKIE,
        key.strip(),
        max_age=_MONTH_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
def logout(request: Request) -> Response:
    """Forget the session."""
    refuse_cross_site(request)
    response = _to("/login", request)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return response


def _too_often(request: Request, wait_s: int) -> Response:
    if _is_page(request):
        return RedirectResponse("/login?refused=often", status_code=303, headers={"Retry-After": str(wait_s)})
    detail = f"too many refused sign-ins from this address; try again in {wait_s} s"
    raise ProblemError(429, detail, headers={"Retry-After": str(wait_s)})


def _is_page(request: Request) -> bool:
    return CSRF_HEADER not in request.headers and "text/html" in request.headers.get("accept", "")


def _to(path: str, request: Request) -> Response:
    return RedirectResponse(path, status_code=303) if _is_page(request) else Response(status_code=204)
