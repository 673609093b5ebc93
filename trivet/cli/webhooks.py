"""Webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from service.jobs.spec.common import JobState, WebhookFormat
from trivet.cli.context import JsonFlag, add_commands, add_group, client, print_list, print_secret
from trivet.cli.jobs import age

if TYPE_CHECKING:
    from service.jobs.records.webhooks import Webhook, WebhookDelivery


WebhookArgument = Annotated[str, typer.Argument(metavar="ID", help="a webhook's id")]


def register(app: typer.Typer) -> None:
    about = "Webhooks report jobs to other systems (mostly for admin keys)."
    webhooks = add_group(app, "webhooks", about, create=create_webhook, list=list_webhooks, deliveries=list_deliveries)
    add_commands(webhooks, secret=_show_secret, delete=delete_webhook)


def create_webhook(
    *,
    url: Annotated[str, typer.Argument(help="https:// URL that takes a POST, or mailto:ADDRESS")],
    on: Annotated[
        list[str] | None,
        typer.Option(help="state to report, such as failed; may be repeated; if absent, the states that end a job"),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="kind of job to report; may be repeated; all if absent")
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="project of the jobs; if absent the key's, or all for an operator's key")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="standard (signed), slack (a text for chats), email (for mailto:ADDRESS)")
    ] = "standard",
    as_json: JsonFlag = False,
) -> None:
    """Create a webhook and print the secret that signs its deliveries, once."""
    with client() as service:
        made = service.webhooks.create(
            url,
            states=cast(list[JobState] | None, on),
            kinds=kind or (),
            project=project,
            format=cast(WebhookFormat, form),
        )
    print_secret(*made, as_json)


def list_webhooks(as_json: JsonFlag = False) -> None:
    """List webhooks."""
    columns = "id", "url", "project", "on", "kinds", "state"
    with client() as service:
        print_list(service.webhooks.list(), as_json, columns, _row, "no webhooks")


def _row(webhook: Webhook) -> tuple[str, ...]:
    kinds = ", ".join(webhook.kinds) or "all"
    return webhook.id, webhook.url, webhook.project or "all", ", ".join(webhook.states), kinds, _state(webhook)


def _state(webhook: Webhook) -> str:
    if webhook.disabled_at is not None:
        return f"disabled {age(webhook.disabled_at)} ago"
    return "works" if webhook.failing_since is None else f"failing since {age(webhook.failing_since)}"


def list_deliveries(webhook_id: WebhookArgument, as_json: JsonFlag = False) -> None:
    """List a webhook's newest deliveries and their outcome."""
    columns = "id", "event", "job", "state", "attempts", "error"
    with client() as service:
        print_list(service.webhooks.deliveries(webhook_id), as_json, columns, _delivery_row, "no deliveries")


def _delivery_row(made: WebhookDelivery) -> tuple[str, ...]:
    return made.id, made.event.type, made.event.data.job, made.state, str(made.attempts), made.error or ""


def _show_secret(
    project: Annotated[str | None, typer.Option(help="project of the jobs; the key's if absent")] = None,
    renew: Annotated[bool, typer.Option(help="replace it (needs an admin key)")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the secret that signs the deliveries of `notify` in jobs."""
    with client() as service:
        secret = service.webhooks.secret(project=project, renew=renew)
    print_secret(None, secret, as_json)


def delete_webhook(webhook_id: WebhookArgument) -> None:
    """Delete a webhook; nothing more is sent."""
    with client() as service:
        service.webhooks.delete(webhook_id)
