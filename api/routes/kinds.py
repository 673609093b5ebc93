"""Serves the kinds of jobs, the models, data and so on that they can name, and the schemas of their specs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.callers import Reader
from service.jobs.kinds.listing import all_kinds
from service.jobs.kinds.registry import KINDS
from service.jobs.records import NotFound
from service.jobs.records.kinds import Kinds

router = APIRouter(tags=["kinds"])


@router.get("/kinds")
def list_kinds(key: Reader) -> Kinds:
    """List everything that a spec can name: kinds of jobs, model families, data sources, objectives, optimizers,
    schedules and programs, with their packages.
    """
    return all_kinds()


@router.get("/kinds/{kind}/schema")
def get_kind_schema(kind: str, key: Reader) -> dict[str, Any]:
    """Return the JSON Schema of a kind's spec."""
    if kind not in KINDS.provided:
        raise NotFound(f"there is no kind {kind!r}; there are {', '.join(KINDS.provided)}")
    return KINDS.declaration(kind).config.model_json_schema()
