"""Serves API keys and the caller's identity, so that a page or a script offers only what the caller may do."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, status
from pydantic import AwareDatetime, BaseModel, Field, StringConstraints

from api.callers import Admin, Reader, StoreDep, audit, granted
from api.requests import ProblemError, StrictRoute
from service.jobs.accounts import ProjectName, Scope
from service.jobs.records import ApiKey

router = APIRouter(tags=["keys"], route_class=StrictRoute)

_LONGEST_GRACE_S = 30 * 86_400.0
KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class NewKey(BaseModel, extra="forbid"):
    """The owner of a key, and what it may do. Keys of one name own the same jobs."""

    name: KeyName
    scopes: list[Scope] = Field(default=["read"], min_length=1, max_length=3)
    project: ProjectName | None = Field(
        None, description="where the key speaks; `default` when absent, or everywhere for a key with the scope `admin`"
    )

    expires_at: AwareDatetime | None = Field(
        None, description="when the key stops working; when absent, as late as the service allows"
    )


class Rotation(BaseModel, extra="forbid"):
    """Terms by which a successor replaces a key."""

    grace_s: float = Field(
        86_400.0, ge=0, le=_LONGEST_GRACE_S, description="seconds for which the old secret still works"
    )
    expires_at: AwareDatetime | None = Field(
        None, description="when the new key expires; after as long a life as the old one's when absent"
    )


class CreatedKey(ApiKey):
    """A key and its secret, which is shown this once."""

    secret: str


class Keys(BaseModel):
    items: list[ApiKey]


@router.post("/keys", status_code=status.HTTP_201_CREATED)
def create_key(body: NewKey, request: Request, key: Admin, store: StoreDep) -> CreatedKey:
    """Create a key. The secret is in this answer and nowhere else."""
    created, secret = store.keys.create(
        body.name, tuple(dict.fromkeys(body.scopes)), body.project, expires_at=body.expires_at
    )
    audit(
        request,
        "key.create",
        subject=created.id,
        name=created.name,
        project=created.project or "",
        scopes=",".join(created.scopes),
    )
    return CreatedKey(**created.model_dump(), secret=secret)


@router.get("/keys")
def list_keys(key: Admin, store: StoreDep) -> Keys:
    """List all keys, without their secrets."""
    return Keys(items=list(store.keys.list()))


@router.post("/keys/{key_id}/rotate", status_code=status.HTTP_201_CREATED)
def rotate_key(key_id: str, request: Request, key: Admin, store: StoreDep, body: Rotation | None = None) -> CreatedKey:
    """Create a successor of a key, which works for a while longer. The secret is in this answer and nowhere
    else.
    """
    asked = body or Rotation()
    created, secret = store.keys.rotate(key_id, grace_s=asked.grace_s, expires_at=asked.expires_at)
    audit(request, "key.rotate", subject=key_id, successor=created.id, name=created.name, grace_s=str(asked.grace_s))
    return CreatedKey(**created.model_dump(), secret=secret)


@router.delete("/keys/{key_id}", status_code=status.HTTP_204_NO_CONTENT)
def revoke_key(key_id: str, request: Request, key: Admin, store: StoreDep) -> None:
    """Revoke a key at once. A key cannot revoke itself, so the last admin key stays."""
    if key_id == key.id:
        raise ProblemError(409, "a key cannot revoke itself; use another admin key")
    store.keys.revoke(key_id)
    audit(request, "key.revoke", subject=key_id)


class Me(BaseModel):
    """The caller of a request."""

    name: str
    project: str | None = Field(description="the project of the key; null of an operator's")
    scopes: list[Scope] = Field(description="all that the key may do, with what other scopes include")
    operator: bool = Field(description="whether the key may change the service itself: hosts, projects, keys")


@router.get("/me")
def get_me(key: Reader) -> Me:
    """Return the owner of the request's key, and what it may do."""
    scopes = sorted(granted(key))
    operator = "admin" in scopes and key.is_operator
    return Me(name=key.name, project=key.project, scopes=scopes, operator=operator)
