"""Hosts, keys and settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, cast

import typer

from service.jobs.records import Host, Scope
from service.jobs.settings import Settings, describe
from trivet.cli.context import JsonFlag, client, fails_well, out, print_json, table
from trivet.cli.jobs import age

keys_app = typer.Typer(help="API keys (needs an admin key).", no_args_is_help=True)
hosts_app = typer.Typer(help="Worker hosts.", invoke_without_command=True)


def register(app: typer.Typer) -> None:
    hosts_app.callback()(fails_well(hosts))
    hosts_app.command()(fails_well(drain))
    hosts_app.command()(fails_well(resume))
    keys_app.command("create")(fails_well(create_key))
    keys_app.command("list")(fails_well(list_keys))
    keys_app.command("revoke")(fails_well(revoke_key))
    app.add_typer(hosts_app, name="hosts")
    app.add_typer(keys_app, name="keys")
    app.command()(fails_well(settings))


def hosts(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List worker hosts and their devices; or: drain NAME, resume NAME."""
    if context.invoked_subcommand is not None:
        return
    with client() as service:
        found = service.hosts()
    if as_json:
        print_json({"items": [host.model_dump(mode="json") for host in found]})
        return
    rows = table("host", "state", "cuda free", "cpu free", "running", "isolation", "seen")
    for host in found:
        free = {pool: len(host.free.get(pool, ())) for pool in ("cuda", "cpu")}
        rows.add_row(
            host.name,
            _state(host),
            f"{free['cuda']}/{len(host.cuda)}",
            f"{free['cpu']}/{host.cpu_slots}",
            " ".join(host.running),
            " ".join(host.isolation),
            age(host.seen_at),
        )
    out.print(rows if found else "no hosts; start a worker with: trivet worker")
    for host in found:
        if (failing := host.failing) is not None:
            again = f"tried again in {failing.retry_in_s:.0f} s, or at once after: trivet hosts resume {host.name}"
            out.print(f"{host.name} gets no work since {age(failing.since)}: {failing.reason}; {again}", markup=False)


def _state(host: Host) -> str:
    if not host.alive:
        return "lost"
    return "draining" if host.draining else "failing" if host.failing else "alive"


def drain(name: Annotated[str, typer.Argument(help="host")]) -> None:
    """Place nothing more on a host; what runs there goes on."""
    with client() as service:
        out.print(f"{service.drain(name).name} is draining")


def resume(name: Annotated[str, typer.Argument(help="host")]) -> None:
    """Let a host take jobs again that was drained, or that failed to start some."""
    with client() as service:
        out.print(f"{service.resume(name).name} takes jobs again")


def create_key(
    name: Annotated[str, typer.Argument(help="whose key; jobs are owned by this name")],
    scopes: Annotated[list[str] | None, typer.Option("--scope", help="read, submit or admin; may be repeated")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and print its secret, this once."""
    with client() as service:
        key, secret = service.keys.create(name, cast(list[Scope], scopes or ["submit"]))
    if as_json:
        print_json(key.model_dump(mode="json") | {"secret": secret})
    else:
        out.write_line(secret)


def list_keys(as_json: JsonFlag = False) -> None:
    """List keys."""
    with client() as service:
        found = service.keys.list()
    if as_json:
        print_json({"items": [key.model_dump(mode="json") for key in found]})
        return
    rows = table("id", "name", "scopes", "created", "last used")
    for key in found:
        used = "never" if key.last_used_at is None else f"{age(key.last_used_at)} ago"
        rows.add_row(key.id, key.name, ", ".join(key.scopes), f"{age(key.created_at)} ago", used)
    out.print(rows)


def revoke_key(key_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a key, at once."""
    with client() as service:
        service.keys.revoke(key_id)


def settings(as_json: JsonFlag = False) -> None:
    """List every setting: its variable, its value here, where that came from."""
    found = describe(Settings())
    if as_json:
        print_json({"settings": [asdict(line) for line in found]})
        return
    rows = table("variable", "value", "source", "meaning")
    for line in found:
        rows.add_row(line.variable, line.value, line.source, line.description)
    out.print(rows)
    out.print("TRIVET_CONFIG names a TOML file with the same settings by name.")
