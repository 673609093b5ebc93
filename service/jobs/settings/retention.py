"""Settings of what is kept, and how much of it."""

from __future__ import annotations

from pydantic import BaseModel, Field

from service.jobs.records.store_limits import StoreLimits

MAX_LOG_BYTES = 256 << 20


class RetentionSettings(BaseModel):
    """How long and how much is kept of jobs, uploads, logs, caches and the audit log."""

    keep_jobs_days: float | None = Field(
        None, gt=0, description="days after which ended jobs are deleted with their files; kept when absent"
    )

    max_audit_bytes: int = Field(
        StoreLimits.max_audit_bytes,
        ge=16 << 20,
        description="most bytes of the audit log's files; beyond, the oldest entries are deleted",
    )

    keep_uploads_days: float | None = Field(
        StoreLimits.keep_uploads_days,
        ge=0,
        le=1_000_000,
        description="days without a submission after which an upload is deleted; 0 keeps all",
    )

    max_job_artifacts: int = Field(
        StoreLimits.max_job_artifacts, ge=1, le=1_000_000, description="most artifacts of one job"
    )
    max_job_artifact_bytes: int = Field(
        StoreLimits.max_job_artifact_bytes,
        ge=1 << 20,
        description="most bytes of all artifacts of one job, folders included",
    )
    max_log_bytes: int = Field(
        MAX_LOG_BYTES,
        ge=1 << 16,
        description="bytes kept of a rank's output in an attempt: the first quarter, and the newest of the rest",
    )
    max_cache_bytes: int = Field(
        20 << 30,
        ge=0,
        description="most bytes of what jobs make of uploaded files, and of what they compile and trace on each host; "
        "beyond, the longest unused is deleted first",
    )
