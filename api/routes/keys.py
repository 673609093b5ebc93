"""API keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, status
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from api.context import StoreDep
from api.problems import ProblemError
from api.security import Admin
from service.jobs.records import ApiKey, Scope

router = APIRouter(tags=["keys"])

_KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class NewKey(BaseModel):
    """Whom a key is for, and what it may do. Keys of one name own the same jobs."""

    model_config = ConfigDict(extra="forbid")

    name: _KeyName
    scopes: list[Scope] = Field(default=["read"], min_length=1, max_length=3)


class CreatedKey(ApiKey):
    """A key and its secret, which is shown this once."""

    secret: str


class Keys(BaseModel):
    items: list[ApiKey]


@router.post("/keys", status_code=status.HTTP_201_CREATED)
def create_key(body: NewKey, key: Admin, store: StoreDep) -> CreatedKey:
    """Create a key. The secret is in this answer and nowhere else."""
    created, secret = store.keys.create(body.name, tuple(dict.fromkeys(body.scopes)))
    return CreatedKey(**created.model_dump(), secret=secret)


@router.get("/keys")
def list_keys(key: Admin, store: StoreDep) -> Keys:
    """List all keys, without their secrets."""
    return Keys(items=list(store.keys.list()))


@router.delete("/keys/{key_id}", status_code=status.HTTP_204_NO_CONTENT)
def revoke_key(key_id: str, key: Admin, store: StoreDep) -> None:
    """Revoke a key, at once. A key cannot revoke itself, so the last admin stays."""
    if key_id == key.id:
        raise ProblemError(409, "a key cannot revoke itself; use another admin key")
    store.keys.revoke(key_id)
