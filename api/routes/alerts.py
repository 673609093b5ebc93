"""Lists the alerts that operators must know of now."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.callers import Admin, ContextDep
from service.jobs.monitoring.alerts import ShownAlert

router = APIRouter(tags=["alerts"])


class Alerts(BaseModel):
    items: list[ShownAlert]


@router.get("/alerts")
def list_alerts(
    key: Admin,
    context: ContextDep,
    everything: Annotated[bool, Query(alias="all", description="also list those that do not fire")] = False,
) -> Alerts:
    """List the service's alerts, firing ones first, judged by its numbers now and in the last three quarters of
    an hour.
    """
    statuses = context.monitor.alerts()
    return Alerts(items=[ShownAlert.of(status) for status in statuses if everything or status.state != "ok"])
