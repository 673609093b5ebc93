"""Tells callers who they are to the service, so that a page or a script offers only what they may do."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.security import Reader, granted
from service.jobs.projects import Scope

router = APIRouter(tags=["keys"])


class Me(BaseModel):
    """The caller of a request."""

    name: str
    project: str | None = Field(description="the project of the key; null of an operator's")
    scopes: list[Scope] = Field(description="all that the key may do, with what other scopes include")
    operator: bool = Field(description="whether the key may change the service itself: hosts, projects, keys")


@router.get("/me")
def get_me(key: Reader) -> Me:
    """Return who the request's key belongs to, and what it may do."""
    scopes = sorted(granted(key))
    operator = "admin" in scopes and key.is_operator
    return Me(name=key.name, project=key.project, scopes=scopes, operator=operator)
