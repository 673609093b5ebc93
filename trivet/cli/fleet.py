"""Commands for hosts, keys, alerts and settings."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, cast

import typer

from service.jobs.accounts import ROLES, SCOPES, Scope
from service.jobs.spec.common import LOCAL
from trivet.cli.context import (
    JsonFlag,
    add_commands,
    add_group,
    client,
    duration,
    err,
    future,
    out,
    print_json,
    print_list,
    print_secret,
    refuse,
)
from trivet.cli.exit_codes import ExitCode
from trivet.cli.jobs import age

if TYPE_CHECKING:
    from service.jobs.monitoring.alerts import ShownAlert
    from service.jobs.records import ApiKey, Host

ExpiresOption = Annotated[
    str | None, typer.Option(help="when it stops working: a length of time such as 90d, or a time; else never")
]


def register(app: typer.Typer) -> None:
    add_commands(app, alerts, settings)
    add_group(app, "hosts", "Worker hosts.", drain, resume, first=hosts)
    about = "API keys (needs an admin key)."
    add_group(app, "keys", about, create=create_key, list=list_keys, rotate=rotate_key, revoke=revoke_key)


def hosts(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List worker hosts and their devices; or: drain NAME, resume NAME."""
    if context.invoked_subcommand is not None:
        return
    with client() as service:
        found = service.hosts()
    columns = "host", "state", "launcher", "cuda free", "cpu free", "running", "isolation", "seen"
    print_list(found, as_json, columns, _host_row, "no hosts; start a worker with: trivet worker")
    for host in () if as_json else found:
        for launcher, has in host.launchers.items():
            out.print(f"{launcher}, asked by {host.name}: {has}", markup=False)
        if host.overcommitted is not None:
            out.print(f"{host.name} is overcommitted: {host.overcommitted}", markup=False)
        if (failing := host.failing) is not None:
            again = f"tried again in {failing.retry_in_s:.0f} s, or at once after: trivet hosts resume {host.name}"
            out.print(f"{host.name} gets no work since {age(failing.since)}: {failing.reason}; {again}", markup=False)


def _host_row(host: Host) -> tuple[str, ...]:
    launcher = LOCAL if host.allocation is None else f"{host.allocation.launcher} {host.allocation.id}"
    has = {"cuda": len(host.cuda), "cpu": host.cpu_slots}
    free = [f"{len(host.free.get(pool, ()))}/{count}" for pool, count in has.items()]
    return host.name, host.state, launcher, *free, " ".join(host.running), " ".join(host.isolation), age(host.seen_at)


def alerts(
    everything: Annotated[bool, typer.Option("--all", help="also list those that do not fire")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List what is wrong with the service, and what to do about it (needs an admin key). Exit 1 if something is."""
    with client() as service:
        found = service.alerts(everything=everything)
    columns = "alert", "state", "severity", "about", "value", "for", "meaning; what to do"
    print_list(found, as_json, columns, _alert_row, "nothing is wrong")
    if any(alert.state == "firing" for alert in found):
        raise typer.Exit(ExitCode.FAILED)


def _alert_row(alert: ShownAlert) -> tuple[str, ...]:
    about = " ".join(f"{label}={value}" for label, value in alert.labels.items())
    value = "" if alert.value is None else f"{alert.value:.4g}"
    told = alert.meaning if alert.state == "ok" else f"{alert.meaning} {alert.action}"
    lasts = "" if alert.since is None else age(alert.since)
    return alert.name, alert.state, alert.severity, about, value, lasts, told


def drain(name: Annotated[str, typer.Argument(help="host")]) -> None:
    """Place nothing more on a host; its running jobs go on."""
    with client() as service:
        out.print(f"{service.drain(name).name} is draining")


def resume(name: Annotated[str, typer.Argument(help="host")]) -> None:
    """Let a drained or failing host take jobs again."""
    with client() as service:
        out.print(f"{service.resume(name).name} takes jobs again")


def create_key(
    name: Annotated[str, typer.Argument(help="owner of the key and of its jobs")],
    *,
    scopes: Annotated[list[str] | None, typer.Option("--scope", help="read, submit or admin; may be repeated")] = None,
    project: Annotated[
        str | None, typer.Option(help="project of the key; an admin key without one acts in all")
    ] = None,
    role: Annotated[str | None, typer.Option(help=f"{', '.join(ROLES)}: its role there")] = None,
    expires: ExpiresOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and print its secret, once."""
    chosen = _scopes(scopes, project, role)
    with client() as service:
        print_secret(*service.keys.create(name, chosen, project, expires_at=future(expires)), as_json)


def rotate_key(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    grace: Annotated[str, typer.Option(help="how long the old secret still works, such as 24h or 0s")] = "24h",
    expires: ExpiresOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a successor of a key, and print its secret, once."""
    length = duration(grace)
    if length is None:
        refuse(f"--grace: {grace!r} is not a length of time such as 24h or 7d")
    with client() as service:
        made = service.keys.rotate(key_id, grace_s=length.total_seconds(), expires_at=future(expires))
        print_secret(*made, as_json)


def _scopes(scopes: list[str] | None, project: str | None, role: str | None) -> list[Scope]:
    """Return the given scopes, or the scope of the role."""
    if role is None:
        return cast(list[Scope], scopes or ["submit"])
    if scopes or project is None:
        refuse("--role needs --project and excludes --scope")
    return scopes_of(role)


def scopes_of(role: str) -> list[Scope]:
    """Return the scopes of a role; refuse an unknown one."""
    if role not in ROLES:
        refuse(f"--role {role} is not known; there are {', '.join(ROLES)}")
    return [SCOPES[ROLES.index(role)]]


def list_keys(as_json: JsonFlag = False) -> None:
    """List keys."""
    columns = "id", "name", "project", "scopes", "created", "last used", "expires"
    with client() as service:
        print_list(service.keys.list(), as_json, columns, _key_row)


def _key_row(key: ApiKey) -> tuple[str, ...]:
    used = "never" if key.last_used_at is None else f"{age(key.last_used_at)} ago"
    project = "(all)" if key.project is None else key.project
    return key.id, key.name, project, ", ".join(key.scopes), f"{age(key.created_at)} ago", used, _end(key)


def _end(key: ApiKey) -> str:
    if key.expires_at is None:
        return "never"
    when = "expired" if key.expires_at <= datetime.now(UTC) else key.expires_at.isoformat(timespec="minutes")
    return when if key.successor is None else f"{when}, rotated to {key.successor}"


def revoke_key(key_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a key at once."""
    with client() as service:
        service.keys.revoke(key_id)


def settings(as_json: JsonFlag = False) -> None:
    """List every setting: its variable, its value here, and where that came from."""
    from service.jobs.settings import Settings, describe, unknown_variables  # noqa: PLC0415 - few commands need them

    found = describe(Settings())
    for told in unknown_variables():
        err.print(told, style="yellow")
    if as_json:
        print_json({"settings": [asdict(line) for line in found]})
        return
    columns = "variable", "value", "source", "meaning"
    print_list(found, False, columns, lambda line: (line.variable, line.value, line.source, line.description))
    out.print("TRIVET_CONFIG names a TOML file with the same settings by name.")
