"""Service accounts: programs that own jobs."""

from __future__ import annotations

from fastapi import APIRouter, Request, status
from pydantic import AwareDatetime, BaseModel, Field

from api.callers import Admin, StoreDep, audit
from api.requests import StrictRoute
from api.routes.keys import CreatedKey, KeyName
from service.jobs.accounts import ProjectName, Scope
from service.jobs.records import ServiceAccount

router = APIRouter(tags=["accounts"], route_class=StrictRoute)


class NewAccount(BaseModel, extra="forbid"):
    """The name of a program, and the role of its keys."""

    name: KeyName
    scopes: list[Scope] = Field(default=["submit"], min_length=1, max_length=3)
    project: ProjectName | None = Field(
        None, description="project of the key; `default` when absent, or all projects with the scope `admin`"
    )


class NewAccountKey(BaseModel, extra="forbid"):
    """How long a key of an account works."""

    expires_at: AwareDatetime | None = Field(
        None, description="when the key stops working; when absent, as late as the service allows"
    )


class Accounts(BaseModel):
    items: list[ServiceAccount]


@router.post("/accounts", status_code=status.HTTP_201_CREATED)
def create_account(body: NewAccount, request: Request, key: Admin, store: StoreDep) -> ServiceAccount:
    """Create a service account, which has no keys yet."""
    account = store.accounts.create(body.name, body.scopes, body.project)
    audit(
        request, "account.create", subject=account.name, project=account.project or "", scopes=",".join(account.scopes)
    )
    return account


@router.get("/accounts")
def list_accounts(key: Admin, store: StoreDep) -> Accounts:
    """List service accounts by name, with their keys."""
    return Accounts(items=store.accounts.list())


@router.post("/accounts/{name}/keys", status_code=status.HTTP_201_CREATED)
def create_account_key(
    name: str, request: Request, key: Admin, store: StoreDep, body: NewAccountKey | None = None
) -> CreatedKey:
    """Create a key of a service account. The secret is in this answer and nowhere else."""
    account = store.accounts.get(name)
    created, secret = store.keys.create_for(account, expires_at=body.expires_at if body else None)
    audit(request, "key.create", subject=created.id, name=created.name, scopes=",".join(created.scopes))
    return CreatedKey(**created.model_dump(), secret=secret)


@router.post("/accounts/{name}/disable")
def disable_account(name: str, request: Request, key: Admin, store: StoreDep) -> ServiceAccount:
    """Stop all keys of a service account at once. Its jobs go on."""
    account = store.accounts.disable(name)
    audit(request, "account.disable", subject=name)
    return account


@router.post("/accounts/{name}/enable")
def enable_account(name: str, request: Request, key: Admin, store: StoreDep) -> ServiceAccount:
    """Let the keys of a service account work again."""
    account = store.accounts.enable(name)
    audit(request, "account.enable", subject=name)
    return account


@router.delete("/accounts/{name}", status_code=status.HTTP_204_NO_CONTENT)
def delete_account(name: str, request: Request, key: Admin, store: StoreDep) -> None:
    """Delete a service account and revoke its keys. Its jobs stay."""
    revoked = store.accounts.delete(name)
    audit(request, "account.delete", subject=name, keys=str(revoked))
