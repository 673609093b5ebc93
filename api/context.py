"""Gives handlers the store, the settings and the stream hub, which the application factory attaches once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, FastAPI, Request

from api.checker import Checker
from api.monitoring import Monitor
from api.sign_in.provider import OpenIdProvider
from api.stream import Hub
from api.webhook_sender import WebhookSender
from service.jobs.settings import Settings
from service.jobs.store import Store


@dataclass(frozen=True)
class Context:
    """Everything that lives as long as the application."""

    settings: Settings
    store: Store
    probe: Store
    """A second client of the store, for readiness: it does not wait for a broker that is away."""
    hub: Hub
    checker: Checker
    provider: OpenIdProvider | None
    """Where people sign in, if the operator has set one."""
    monitor: Monitor
    webhooks: WebhookSender


def attach(app: FastAPI, context: Context) -> None:
    app.state.context = context


def context_of(app: FastAPI) -> Context:
    return cast(Context, app.state.context)


# Each is a coroutine: the framework would run a plain function in a thread.


async def _context(request: Request) -> Context:
    return context_of(request.app)


ContextDep = Annotated[Context, Depends(_context)]


async def _store(context: ContextDep) -> Store:
    return context.store


async def _hub(context: ContextDep) -> Hub:
    return context.hub


async def _checker(context: ContextDep) -> Checker:
    return context.checker


async def _settings(context: ContextDep) -> Settings:
    return context.settings


StoreDep = Annotated[Store, Depends(_store)]
HubDep = Annotated[Hub, Depends(_hub)]
CheckerDep = Annotated[Checker, Depends(_checker)]
SettingsDep = Annotated[Settings, Depends(_settings)]
