"""Settings of the queue: leases, order, quotas, further attempts."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from service.jobs.accounts import parse_quotas
from service.jobs.records.store_limits import StoreLimits

_DAY_S = 86_400.0
_Silence = Annotated[float, Field(ge=1, le=_DAY_S)]
"""Seconds after which something counts as gone."""
_Wait = Annotated[float, Field(ge=0, le=365 * _DAY_S)]
"""Seconds that a job may have to wait."""


class QueueSettings(BaseModel):
    """When a part or a host counts as lost, who goes first, and what projects may use."""

    lease_s: _Silence = Field(StoreLimits.lease_s, description="seconds of silence after which a running part is lost")
    starting_lease_s: _Silence = Field(
        StoreLimits.starting_lease_s, description="seconds after which a placed part that nobody claims is taken back"
    )
    heartbeat_s: _Silence = Field(
        StoreLimits.heartbeat_s, description="seconds of silence after which a host gets no work"
    )
    max_queue_bypass_s: _Wait = Field(
        StoreLimits.max_queue_bypass_s, description="seconds of waiting after which a job is never overtaken"
    )

    default_quotas: str = Field(
        "",
        description="quotas that a project has when it is created: NAME=NUMBER, by comma, such as "
        "queued_jobs=200,devices=8; `trivet projects set` changes those of one project",
    )
    quota_window_h: int = Field(
        StoreLimits.quota_window_h,
        ge=1,
        le=744,
        description="hours that quotas of device-hours count, the current one included",
    )
    fair_share_half_life_s: float = Field(
        StoreLimits.fair_share_half_life_s,
        ge=1,
        le=365 * _DAY_S,
        description="seconds after which a project's use counts half as much against other projects",
    )
    fair_share_bound_s: _Wait | None = Field(
        None,
        description="seconds of waiting after which projects that used less no longer overtake a job; "
        "max_queue_bypass_s when absent",
    )

    preemption_min_run_s: _Wait = Field(
        StoreLimits.preemption_min_run_s,
        description="seconds that a preemptible job runs before it may be asked to make room",
    )

    max_lost_attempts: int = Field(
        StoreLimits.max_lost_attempts,
        ge=0,
        le=1000,
        description="attempts that hosts or the broker may lose before the job fails; retries are extra",
    )

    @field_validator("default_quotas")
    @classmethod
    def _are_quotas(cls, text: str) -> str:
        parse_quotas(text)
        return text
