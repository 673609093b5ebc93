"""Serves webhooks, which report jobs to other systems."""

from __future__ import annotations

from typing import Annotated

from anyio import from_thread
from fastapi import APIRouter, Query, Request, Security, status
from pydantic import BaseModel, Field

from api.callers import Caller, ContextDep, ReadableJob, StoreDep, Submitter, TargetProject, audit, authenticated
from api.deliveries import NamedAddresses, check_recipient
from api.requests import StrictRoute
from service.jobs.accounts import ProjectName
from service.jobs.kinds.registry import KINDS
from service.jobs.records import NotFound, Problem, Rejected
from service.jobs.records.webhooks import Webhook, WebhookDelivery, WebhookEvent
from service.jobs.settings import Settings
from service.jobs.spec.common import TERMINAL, JobState, WebhookFormat, check_receiver
from service.jobs.store import Store

router = APIRouter(tags=["webhooks"], route_class=StrictRoute)
Maintainer = Annotated[Caller, Security(authenticated, scopes=["admin"])]


class NewWebhook(BaseModel, extra="forbid"):
    """A new webhook: its URL, and what it reports."""

    url: str = Field(max_length=2000, description="https:// URL that takes a POST, or mailto:ADDRESS")
    format: WebhookFormat = Field(
        "standard", description="`standard` is signed, `slack` has a text for chats, `email` is for mailto:ADDRESS"
    )
    states: list[JobState] = Field(
        sorted(TERMINAL),
        min_length=1,
        max_length=7,
        description="states of jobs to report; the states that end a job when absent",
    )
    kinds: list[str] = Field([], max_length=100, description="kinds of jobs to report; all when absent")
    project: ProjectName | None = Field(
        None, description="project whose jobs to report; the key's when absent, or all for an operator's key"
    )


class CreatedWebhook(Webhook):
    """A webhook and its secret, which is shown this once."""

    secret: str


class WebhookList(BaseModel):
    items: list[Webhook]


class Deliveries(BaseModel):
    items: list[WebhookDelivery]


class WebhookSecret(BaseModel):
    """The secret that signs the deliveries of jobs' `notify`."""

    project: str = Field(description="the project whose jobs' deliveries it signs")
    secret: str = Field(description="the secret for `trivet.webhooks.verify`, or any library of Standard Webhooks")


@router.post("/webhooks", status_code=status.HTTP_201_CREATED)
def create_webhook(body: NewWebhook, request: Request, key: Maintainer, context: ContextDep) -> CreatedWebhook:
    """Create a webhook. The secret is in this answer and nowhere else."""
    store = context.store
    if problems := _problems(body, key, context.settings):
        raise Rejected(problems)
    project = store.projects.get(body.project).name if body.project is not None else key.project
    states: list[JobState] = list(dict.fromkeys(body.states))
    created, secret = store.webhooks.create(
        body.url, states, list(dict.fromkeys(body.kinds)), project=project, by=key.name, form=body.format
    )
    audit(request, "webhook.create", subject=created.id, project=project or "")
    return CreatedWebhook(**created.model_dump(), secret=secret)


@router.get("/webhooks")
def list_webhooks(key: Maintainer, store: StoreDep) -> WebhookList:
    """List the webhooks of the key's project, an operator's key all, without their secrets."""
    return WebhookList(items=[webhook for webhook in store.webhooks.list() if _is_of(webhook, key)])


@router.get("/webhooks/{webhook_id}/deliveries")
def list_deliveries(
    webhook_id: str, key: Maintainer, store: StoreDep, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Deliveries:
    """List the newest deliveries of a webhook, newest first, with their outcome."""
    _check_own(store, webhook_id, key)
    return Deliveries(items=store.webhooks.deliveries(webhook_id, limit))


@router.get("/webhooks/secret")
def get_webhook_secret(key: Submitter, store: StoreDep, project: TargetProject) -> WebhookSecret:
    """Return the secret that signs the deliveries of `notify` in the project's jobs."""
    return WebhookSecret(project=project, secret=store.webhooks.secret(project))


@router.post("/webhooks/secret/renew")
def renew_webhook_secret(request: Request, key: Maintainer, store: StoreDep, project: TargetProject) -> WebhookSecret:
    """Replace that secret at once: receivers need the new one."""
    secret = store.webhooks.renew_secret(project)
    audit(request, "webhook.renew", project=project)
    return WebhookSecret(project=project, secret=secret)


@router.get("/jobs/{job_id}/notices")
def list_notices(job: ReadableJob, store: StoreDep, limit: Annotated[int, Query(ge=1, le=200)] = 50) -> Deliveries:
    """List the deliveries of the `notify` in a job's spec, newest first, with their outcome."""
    return Deliveries(items=store.webhooks.notices(job.id, limit))


@router.delete("/webhooks/{webhook_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_webhook(webhook_id: str, request: Request, key: Maintainer, store: StoreDep) -> None:
    """Delete a webhook; nothing more is sent."""
    _check_own(store, webhook_id, key)
    store.webhooks.delete(webhook_id)
    audit(request, "webhook.delete", subject=webhook_id)


callbacks = APIRouter()


@callbacks.post("job")
def job_webhook(body: WebhookEvent) -> None:
    """Report to a receiver that a job has a new state, or that one of its numbers has reached a threshold. A
    repeated delivery has the same `webhook-id`; `webhook-signature` is that of Standard Webhooks over id,
    `webhook-timestamp` and body. Any 2xx is success.
    """


def _problems(body: NewWebhook, key: Caller, settings: Settings) -> list[Problem]:
    problems = []
    try:
        check_receiver(body.url, body.format)
        if body.format == "email":
            check_recipient(settings, body.url)
        problems += from_thread.run(NamedAddresses(settings).forbidden, [("url", body.url)])
    except ValueError as error:
        problems.append(Problem("url", "not a URL that webhooks may go to", body.url, str(error)))
    known = list(KINDS.provided)
    for index, kind in enumerate(body.kinds):
        if kind not in known:
            problems.append(Problem(f"kinds.{index}", "no such kind", kind, f"one of {', '.join(known)}"))
    if body.project is not None and not key.is_operator and body.project != key.project:
        problems.append(Problem("project", "not this key's project", body.project, key.project or ""))
    return problems


def _is_of(webhook: Webhook, key: Caller) -> bool:
    return key.is_operator or webhook.project == key.project


def _check_own(store: Store, webhook_id: str, key: Caller) -> None:
    """Raise :class:`NotFound` even for a webhook of others, which this key may not know of."""
    if not _is_of(store.webhooks.get(webhook_id), key):
        raise NotFound(f"there is no webhook {webhook_id}")
