"""Settings of the service: each one an environment variable ``TRIVET_…`` or a line of a TOML file.

The environment wins over the file. The file is ``TRIVET_CONFIG``, else ``trivet.toml`` in the working directory
when it exists. ``trivet settings`` lists every setting with its value and where it came from.
"""

from __future__ import annotations

import os
import socket
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from service.jobs.layout import DataLayout

ENV_PREFIX = "TRIVET_"
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def config_file() -> Path | None:
    """The TOML file in use. A file that ``TRIVET_CONFIG`` names must exist; the default one need not."""
    named = os.environ.get(f"{ENV_PREFIX}CONFIG")
    if named is not None:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(f"TRIVET_CONFIG={named}: there is no such file")
        return path
    default = Path("trivet.toml")
    return default if default.is_file() else None


class Settings(BaseSettings):
    """What an operator may choose."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    data: Path = Field(Path(".trivet"), description="folder of jobs, files and the embedded broker")
    redis_url: SecretStr | None = Field(None, description="Redis or Valkey to use; the embedded one when absent")

    broker_fsync: Literal["always", "everysec"] = Field(
        "always",
        description="when the embedded broker syncs to disk; under everysec a loss of power takes a second of answers",
    )

    host: str = Field("127.0.0.1", description="address that the API binds")
    port: int = Field(8437, ge=0, le=65535, description="port that the API binds; 0 takes a free one")
    behind_proxy: bool = Field(False, description="a proxy in front of the API ends TLS")
    tls_cert: Path | None = Field(None, description="certificate chain, PEM")
    tls_key: Path | None = Field(None, description="private key, PEM")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="largest JSON body")
    max_file_bytes: int = Field(1 << 30, ge=1024, description="largest uploaded file")
    check_memory_gib: float = Field(
        2.0, ge=0.125, description="memory to check one submitted job and its files, in GiB"
    )
    check_seconds: int = Field(
        60, ge=1, description="processor time to check one submitted job and its files, in seconds"
    )
    max_checks: int = Field(4, ge=1, le=256, description="submitted jobs checked at once, one per owner")
    max_streams: int = Field(1000, ge=1, description="event streams open at once, per API process")
    max_streams_per_key: int = Field(100, ge=1, description="event streams open at once, per API key")

    session_idle_s: float = Field(
        3600.0, gt=0, description="a session of the dashboard ends when it was not used for so long, in seconds"
    )
    session_s: float = Field(
        43_200.0, gt=0, description="a session of the dashboard ends after so long in any case, in seconds"
    )

    worker_name: str = Field(
        default_factory=socket.gethostname, min_length=1, description="name under which a worker reports itself"
    )
    worker_address: str = Field("127.0.0.1", description="address at which other hosts of a gang reach this one")
    warm_supervisors: int = Field(
        1, ge=0, le=64, description="idle supervisors kept ready with torch imported, so that jobs start sooner"
    )
    stop_grace_s: float = Field(
        10.0, ge=0, description="seconds that ranks get to write a checkpoint when their job is stopped"
    )
    cpu_slots: int | None = Field(
        None, ge=0, le=4096, description="CPU ranks that may run here; one per core, but at least 4, when absent"
    )

    lease_s: float = Field(15.0, gt=0, description="a running part that is silent for so long is lost, in seconds")
    starting_lease_s: float = Field(60.0, gt=0, description="a placed part must be claimed within so long, in seconds")
    heartbeat_s: float = Field(10.0, gt=0, description="a host that is silent for so long gets no work, in seconds")
    max_queue_bypass_s: float = Field(
        600.0, ge=0, description="a job that has waited for longer is never overtaken, in seconds"
    )

    max_lost_attempts: int = Field(
        5,
        ge=0,
        le=1000,
        description="attempts of a job that hosts or the broker may lose before it fails; retries are extra",
    )

    keep_jobs_days: float | None = Field(
        None, gt=0, description="ended jobs are deleted with their files after so many days; kept when absent"
    )

    max_cache_bytes: int = Field(
        20 << 30, ge=0, description="what jobs make of uploaded files is deleted beyond this, the longest unused first"
    )

    url: str | None = Field(None, description="API that the command line talks to; this machine's when absent")
    key: SecretStr | None = Field(None, description="API key that the command line uses")

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe messages that are logged"
    )

    @model_validator(mode="after")
    def _tls_needs_both(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key come together: give both, or neither")
        return self

    @property
    def layout(self) -> DataLayout:
        return DataLayout(self.data.resolve())

    @property
    def admin_key_file(self) -> Path:
        """Where the first admin key is kept, readable by its owner only."""
        return self.data.resolve() / "admin.key"

    @property
    def broker_url(self) -> str:
        """The broker to connect to: ``redis_url``, else the embedded one's socket in the data folder."""
        if self.redis_url is not None:
            return self.redis_url.get_secret_value()
        return f"unix://{self.layout.broker / 'broker.sock'}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = config_file()
        file_source = () if path is None else (TomlConfigSettingsSource(settings_cls, toml_file=path),)
        return (init_settings, env_settings, *file_source)


@dataclass(frozen=True)
class SettingLine:
    """One setting as ``trivet settings`` lists it. ``source`` is ``default``, ``environment`` or the file's path."""

    name: str
    variable: str
    value: str
    default: str
    source: str
    description: str


def describe(settings: Settings) -> list[SettingLine]:
    """Every setting, in the order of their declaration; secrets are masked."""
    path = config_file()
    in_file: dict[str, Any] = {} if path is None else tomllib.loads(path.read_text())
    set_outside = {name.upper() for name, value in os.environ.items() if value}
    lines = []
    for name, field in Settings.model_fields.items():
        variable = (ENV_PREFIX + name).upper()
        source = "environment" if variable in set_outside else str(path) if name in in_file else "default"
        default = field.get_default(call_default_factory=True, validated_data={})
        lines.append(
            SettingLine(
                name, variable, _shown(getattr(settings, name)), _shown(default), source, field.description or ""
            )
        )
    return lines


def _shown(value: object) -> str:
    return "" if value is None else str(value)
