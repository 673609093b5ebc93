"""The kinds of jobs and the schemas of their specs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from api.security import Reader
from service.jobs.records import NotFound
from service.jobs.spec import KINDS

router = APIRouter(tags=["kinds"])


class Kind(BaseModel):
    kind: str
    description: str


class Kinds(BaseModel):
    items: list[Kind]


@router.get("/kinds")
def list_kinds(key: Reader) -> Kinds:
    """What can be submitted."""
    return Kinds(items=[Kind(kind=name, description=(spec.__doc__ or "").strip()) for name, spec in KINDS.items()])


@router.get("/kinds/{kind}/schema")
def kind_schema(kind: str, key: Reader) -> dict[str, Any]:
    """JSON Schema of a kind's spec."""
    if kind not in KINDS:
        raise NotFound(f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind].model_json_schema()
