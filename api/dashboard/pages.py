"""Serves the pages of the dashboard, and mounts them on an application.

A page is a template in ``templates/``, a module in ``static/pages/`` and a line in ``PAGES``. The middle of a job page
comes from a module that the job's kind declares (``service.jobs.plugins.JobKind.page``). Shells hold no data:
everything that needs a permission is fetched from the API by the page's module, under the session's cookie.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import get_args
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from api.dashboard.assets import Assets
from service.jobs.kinds.registry import KINDS
from service.jobs.records.audit import AuditAction

HERE = Path(__file__).parent

_COMMON_SHEETS = ("theme.css", "base.css", "controls.css", "panels.css")
_REVALIDATED = {"Cache-Control": "no-cache"}
"""Browsers keep the file, and ask whether it is still the newest."""
_KEPT = {"Cache-Control": "public, max-age=31536000, immutable"}
_VERSIONED = re.compile(r"v-[0-9a-f]{16}/")

SignedIn = Callable[[Request], bool]
"""Whether a request carries a session; without one, pages send the browser to the sign-in page."""


@dataclass(frozen=True)
class Page:
    """``sheets`` are its own style sheets, besides the common ones.

    ``nav`` is the page's word in the main navigation; a page without one belongs to the page at ``parent``.
    """

    path: str
    title: str
    template: str
    module: str
    sheets: tuple[str, ...] = ()
    nav: str | None = None
    parent: str | None = None
    public: bool = False
    operators: bool = False
    """Whether the navigation shows it to operators only; the API decides the rights of each caller."""


PAGES = (
    Page("/", "Jobs", "jobs.html", "jobs.js", ("jobs.css",), nav="Jobs"),
    Page("/queue", "Queue", "queue.html", "queue.js", nav="Queue"),
    Page(
        "/jobs/{job_id}",
        "Job",
        "job.html",
        "job.js",
        ("job.css", "charts.css", "timeline.css", "verify.css", "tree.css", "compile.css"),
        parent="/",
    ),
    Page("/submit", "New job", "submit.html", "submit.js", ("timeline.css", "charts.css", "submit.css"), parent="/"),
    Page("/compare", "Compare", "compare.html", "compare.js", ("charts.css", "compare.css"), parent="/"),
    Page("/hosts", "Hosts", "hosts.html", "hosts.js", ("charts.css", "timeline.css", "hosts.css"), nav="Hosts"),
    Page("/login", "Sign in", "login.html", "login.js", ("login.css",), public=True),
    Page("/login/callback", "Sign in", "login.html", "login.js", ("login.css",), public=True),
    Page("/docs", "API reference", "docs.html", "docs.js", ("swagger/swagger-ui.css", "docs.css"), "API", public=True),
    Page("/files", "Files", "files.html", "files.js", ("files.css",), nav="Files"),
    Page("/specs", "Specs", "specs.html", "specs.js", ("specs.css",), nav="Specs"),
    Page("/projects", "Projects", "projects.html", "projects.js", ("projects.css",), nav="Projects"),
    Page("/keys", "Keys", "keys.html", "keys.js", ("keys.css",), nav="Keys", operators=True),
    Page("/alerts", "Alerts", "alerts.html", "alerts.js", nav="Alerts", operators=True),
    Page("/audit", "Audit", "audit.html", "audit.js", nav="Audit", operators=True),
)


class _OwnFiles:
    """Serves the dashboard's files from memory, the modules of kinds of jobs at ``kinds/``, and the API reference's
    files at ``swagger/``.

    Browsers never ask again about a file below a folder with the version of :class:`Assets`. A request for another
    version, from a page of an earlier or later process, gets this process's file.
    """

    def __init__(self, assets: Assets) -> None:
        self._assets = assets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["path"].removeprefix(scope["root_path"]).removeprefix("/")
        version, _, rest = path.partition("/") if _VERSIONED.match(path) else ("", "", path)
        file = self._assets.files.get(rest)
        if file is None or request.method not in ("GET", "HEAD"):
            raise HTTPException(HTTPStatus.NOT_FOUND if file is None else HTTPStatus.METHOD_NOT_ALLOWED)
        headers = {"ETag": file.etag} | (_KEPT if version == self._assets.version else _REVALIDATED)
        if request.headers.get("if-none-match") == file.etag:
            response = Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        else:
            response = Response(file.content, media_type=file.media_type, headers=headers)
        await response(scope, receive, send)


def mount(app: FastAPI, signed_in: SignedIn | None = None, provider: str | None = None) -> None:
    """Add the pages and their static files to ``app``.

    The API's own routes (``/v1/…``, ``POST /login``, ``POST /logout``) stay as they are. Without ``signed_in``,
    anybody gets every shell, and its module goes to the sign-in page when the API answers 401. ``provider`` is
    the name of the OpenID Connect provider on the sign-in page, if there is one.
    """
    assets = Assets.found()
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, auto_reload=False
    )
    environment.globals["assets"] = assets
    for page in PAGES:
        app.add_api_route(
            page.path,
            _endpoint(page, environment, signed_in, provider),
            methods=["GET"],
            response_class=HTMLResponse,
            include_in_schema=False,
            name=f"dashboard:{page.module}",
        )
    _mount_missing(app, environment, signed_in)
    app.mount("/static", _OwnFiles(assets), name="dashboard:static")


def _mount_missing(app: FastAPI, environment: Environment, signed_in: SignedIn | None) -> None:
    """Answer a browser that asks for an address without a page with one that leads back; others get the problem."""
    template, otherwise = environment.get_template("missing.html"), app.exception_handlers[HTTPException]
    page = Page("", "No such page", "missing.html", "")

    async def show(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code != HTTPStatus.NOT_FOUND or not _wants_page(request):
            answer: Response | Awaitable[Response] = otherwise(request, error)
            return await answer if isinstance(answer, Awaitable) else answer
        known = signed_in is None or signed_in(request)
        navigation = tuple(entry for entry in PAGES if entry.nav) if known else ()
        text = template.render(page=page, sheets=_COMMON_SHEETS, navigation=navigation, path=request.url.path)
        return HTMLResponse(text, status_code=HTTPStatus.NOT_FOUND, headers=_REVALIDATED)

    app.add_exception_handler(HTTPException, show)


def _wants_page(request: Request) -> bool:
    """Return whether a person asks for a page, judged by the address and the types that the browser accepts."""
    is_data = request.url.path.startswith(("/v1/", "/static/"))
    return request.method == "GET" and not is_data and "text/html" in request.headers.get("accept", "")


def _endpoint(
    page: Page, environment: Environment, signed_in: SignedIn | None, provider: str | None
) -> Callable[[Request], Response]:
    template = environment.get_template(page.template)
    navigation = tuple(entry for entry in PAGES if entry.nav) if page.nav or page.parent else ()

    def show(request: Request) -> Response:
        known = signed_in is None or signed_in(request)
        if not known and not page.public:
            return RedirectResponse(
                f"/login?next={quote(_here(request), safe='')}", status_code=303, headers=_REVALIDATED
            )
        text = template.render(
            page=page,
            navigation=navigation if known else (),
            sheets=_COMMON_SHEETS + page.sheets,
            provider=provider,
            kinds=tuple(KINDS.provided),
            actions=get_args(AuditAction),
            kinds_with_page=[name for name, kind in KINDS.provided.items() if kind.declaration.page],
            **request.path_params,
        )
        return HTMLResponse(text, headers=_REVALIDATED)

    return show


def _here(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")
