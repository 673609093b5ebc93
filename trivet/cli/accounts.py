"""Commands for service accounts: programs that own jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from service.jobs.accounts import DEFAULT_PROJECT, ROLES
from trivet.cli.context import JsonFlag, add_group, client, future, out, print_json, print_list, print_secret
from trivet.cli.fleet import ExpiresOption, scopes_of
from trivet.cli.jobs import age

if TYPE_CHECKING:
    from service.jobs.records import ServiceAccount

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="name of the account, which owns its jobs")]


def register(app: typer.Typer) -> None:
    about = "Service accounts (needs an admin key)."
    add_group(app, "accounts", about, create, key, disable, enable, delete, list=list_accounts)


def create(
    name: NameArgument,
    role: Annotated[str, typer.Option(help=f"{', '.join(ROLES)}: what its keys may do in the project")] = "submitter",
    project: Annotated[str, typer.Option(help="project of its keys")] = DEFAULT_PROJECT,
    as_json: JsonFlag = False,
) -> None:
    """Create a service account, which has no keys yet."""
    scopes = scopes_of(role)
    with client() as service:
        account = service.accounts.create(name, scopes, project)
    if as_json:
        print_json(account)
    else:
        out.print(f"created {account.name}; a key of it: trivet accounts key {account.name}")


def key(name: NameArgument, expires: ExpiresOption = None, as_json: JsonFlag = False) -> None:
    """Create a key of a service account and print its secret, once."""
    with client() as service:
        print_secret(*service.accounts.create_key(name, expires_at=future(expires)), as_json)


def list_accounts(as_json: JsonFlag = False) -> None:
    """List service accounts."""
    columns = "name", "project", "scopes", "state", "created", "keys"
    with client() as service:
        print_list(service.accounts.list(), as_json, columns, _row, "no service accounts")


def _row(account: ServiceAccount) -> tuple[str, ...]:
    state = "disabled" if account.disabled else "enabled"
    project = "(all)" if account.project is None else account.project
    ids = " ".join(each.id for each in account.keys)
    return account.name, project, ", ".join(account.scopes), state, f"{age(account.created_at)} ago", ids


def disable(name: NameArgument) -> None:
    """Stop all keys of a service account at once. Its jobs go on."""
    with client() as service:
        out.print(f"{service.accounts.disable(name).name} is disabled")


def enable(name: NameArgument) -> None:
    """Let the keys of a service account work again."""
    with client() as service:
        out.print(f"{service.accounts.enable(name).name} is enabled")


def delete(name: NameArgument) -> None:
    """Delete a service account and revoke its keys. Its jobs stay."""
    with client() as service:
        service.accounts.delete(name)
