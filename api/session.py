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
    """Keep ``key`` in a session cookie and go to the dashboard. A wrong key: back to the form, or 401 to scripts."""
    refuse_cross_site(request)
    if store.keys.verify(key.strip()) is None:
        if _is_page(request):
            return RedirectResponse("/login?refused=1", status_code=303)
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


def _is_page(request: Request) -> bool:
    return CSRF_HEADER not in request.headers and "text/html" in request.headers.get("accept", "")


def _to(path: str, request: Request) -> Response:
    return RedirectResponse(path, status_code=303) if _is_page(request) else Response(status_code=204)
