"""Settings of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from service.jobs.records.store_limits import StoreLimits
from service.jobs.settings.words import Addresses, entries


class ApiSettings(BaseModel):
    """The API's address, its names, TLS, and the limits of a request."""

    admin_key_file: Path | None = Field(
        None,
        description="file for the first admin key, such as one that workers cannot read; `admin.key` in the data "
        "folder when absent",
    )

    host: str = Field("127.0.0.1", description="address that the API binds")
    api_processes: int = Field(1, ge=1, le=64, description="API processes of `trivet up`, which share its port")
    port: int = Field(8437, ge=0, le=65535, description="port that the API binds; 0 takes a free one")
    behind_proxy: bool = Field(False, description="a proxy in front of the API ends TLS")
    trusted_proxies: Addresses = Field(
        "127.0.0.1,::1",
        description="proxies whose forwarded client address is trusted: addresses or networks, by comma (behind_proxy)",
    )
    allowed_hosts: str = Field(
        "", description="further names of this service, separated by commas; *.example.org means all names below it"
    )
    request_head_s: float = Field(15.0, gt=0, description="seconds within which a request's head must be complete")
    request_body_s: float = Field(
        30.0, gt=0, description="seconds within which each 10 kB of a request's body must arrive"
    )
    response_read_s: float = Field(
        30.0,
        gt=0,
        description="seconds within which a client must take each 10 kB of an answer; slower clients are cut off",
    )
    tls_cert: Path | None = Field(None, description="certificate chain, PEM")
    tls_key: Path | None = Field(None, description="private key, PEM")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="largest JSON body")
    max_file_bytes: int = Field(StoreLimits.max_file_bytes, ge=1024, description="largest uploaded file")
    check_memory_gib: float = Field(
        2.0, ge=0.125, le=2**32, description="memory to check one submitted job and its files, in GiB"
    )
    check_seconds: int = Field(
        60, ge=1, description="processor time to check one submitted job and its files, in seconds"
    )
    max_checks: int = Field(4, ge=1, le=256, description="submitted jobs checked at once, one per owner")
    max_streams: int = Field(1000, ge=1, description="event streams open at once, per API process")
    max_streams_per_key: int = Field(100, ge=1, description="event streams open at once, per API key")
    max_reads_per_key: int = Field(
        64,
        ge=1,
        description="expensive reads (lists, metrics, logs, pages of events) of one API key that are answered or "
        "wait at once, per API process; more are refused with 429",
    )

    max_key_days: float | None = Field(
        None,
        gt=0,
        le=36_500,
        description="longest life of an API key, in days, and the life of one that names no end; the first admin key "
        "and older keys are not limited",
    )

    @model_validator(mode="after")
    def _tls_needs_both(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key come together: give both, or neither")
        return self

    @property
    def proxies(self) -> list[str]:
        """Return the addresses and networks of ``trusted_proxies``."""
        return entries(self.trusted_proxies)

    @property
    def allowed_host_names(self) -> list[str]:
        """Return the names of ``allowed_hosts``, in lower case."""
        return entries(self.allowed_hosts.lower())
