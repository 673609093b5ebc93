"""Gives handlers the store, the settings and the stream hub; the application factory attaches them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, FastAPI, Request

from api.callers.audit_queue import AuditQueue
from api.deliveries import WebhookSender
from api.offload import Apart, Checker
from api.server import Monitor
from api.sign_in.provider import OpenIdProvider
from api.streams import Hub
from service.jobs.settings import Settings
from service.jobs.store import Store


@dataclass(frozen=True)
class Context:
    """Everything that lives as long as the application."""

    settings: Settings
    store: Store
    probe: Store
    """A second client of the store, for readiness, which does not wait for an absent broker."""
    hub: Hub
    checker: Checker
    provider: OpenIdProvider | None
    """Where people sign in, if the operator has set one."""
    monitor: Monitor
    webhooks: WebhookSender
    audit_queue: AuditQueue
    apart: Apart | None = None
    """The process that makes expensive answers; without one, this process does."""


def attach(app: FastAPI, context: Context) -> None:
    app.state.context = context


def context_of(app: FastAPI) -> Context:
    return cast(Context, app.state.context)


# Each is a coroutine, since a plain function would run in a thread, and depends only on the request, since the
# framework takes time for each nested dependency.


async def _context(request: Request) -> Context:
    return context_of(request.app)


async def _store(request: Request) -> Store:
    return context_of(request.app).store


async def _hub(request: Request) -> Hub:
    return context_of(request.app).hub


async def _checker(request: Request) -> Checker:
    return context_of(request.app).checker


ContextDep = Annotated[Context, Depends(_context)]
StoreDep = Annotated[Store, Depends(_store)]
HubDep = Annotated[Hub, Depends(_hub)]
CheckerDep = Annotated[Checker, Depends(_checker)]
