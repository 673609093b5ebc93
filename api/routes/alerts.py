"""What an operator must know of now."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.context import ContextDep
from api.security import Admin
from service.jobs.monitoring.alerts import ShownAlert

router = APIRouter(tags=["alerts"])


class Alerts(BaseModel):
    items: list[ShownAlert]


@router.get("/alerts")
def list_alerts(
    key: Admin,
    context: ContextDep,
    everything: Annotated[bool, Query(alias="all", description="those too that are as they should be")] = False,
) -> Alerts:
    """List what is wrong with the service, those that fire first; of its numbers now and of the last three quarters of
    an hour.
    """
    statuses = context.monitor.alerts()
    return Alerts(items=[ShownAlert.of(status) for status in statuses if everything or status.state != "ok"])
