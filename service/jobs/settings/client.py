"""Settings of the command line and of logs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from service.jobs.text import LogFormat


class ClientSettings(BaseModel):
    """The service that the command line asks, and how processes log."""

    url: str | None = Field(None, description="API that the command line uses; that of the data folder when absent")
    key: SecretStr | None = Field(None, description="API key that the command line uses at `url`")
    ca_cert: Path | None = Field(
        None, description="PEM certificate of `url` or of its authority, in place of the system's authorities"
    )

    outage_s: float = Field(
        60.0, ge=0, le=86_400, description="seconds of an outage of the service that commands outlast"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: LogFormat = Field(
        "text", description="format of the logs of API and workers: text for people, or json with one object per line"
    )
