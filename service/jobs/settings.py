"""Settings of the service: each one an environment variable ``TRIVET_…`` or a line of a TOML file.

The environment wins over the file. The file is ``TRIVET_CONFIG``, else ``trivet.toml`` in the working directory
when it exists. ``trivet settings`` lists every setting with its value and where it came from.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from service.jobs.layout import DataLayout
from service.jobs.private import user
from service.jobs.store_limits import StoreLimits

ENV_PREFIX = "TRIVET_"
_DAY_S = 86_400.0
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def config_file() -> Path | None:
    """Return the TOML file in use. A file that ``TRIVET_CONFIG`` names must exist; the default one need not."""
    named = os.environ.get(f"{ENV_PREFIX}CONFIG")
    if named is not None:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(f"TRIVET_CONFIG={named}: there is no such file")
        return path
    default = Path("trivet.toml")
    if not default.is_file():
        return None
    _check_trusted(default)
    return default


def _check_trusted(path: Path) -> None:
    """Refuse a file that somebody else put into the working folder, or could have."""
    strangers = {status.st_uid for status in (path.lstat(), path.stat())} - {os.geteuid(), 0}
    if strangers or path.stat().st_mode & 0o002:
        reason = f"belongs to {user(strangers.pop())}" if strangers else "may be written by every user"
        raise PermissionError(
            f"{path.resolve()} {reason}, so its settings are not used; if they are meant, set {ENV_PREFIX}CONFIG={path}"
        )


class Settings(BaseSettings):
    """Lets an operator choose; each field is a setting with its default, its bounds and its description."""

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
    trusted_proxies: str = Field(
        "127.0.0.1,::1",
        description="proxies whose forwarded client address is trusted: addresses or networks, by comma (behind_proxy)",
    )
    allowed_hosts: str = Field(
        "", description="further names of this service, separated by commas; *.example.org stands for all below it"
    )
    request_head_s: float = Field(15.0, gt=0, description="a request's head must be complete in so long, in seconds")
    request_body_s: float = Field(
        30.0, gt=0, description="seconds within which each 10 kB of a request's body must arrive"
    )
    tls_cert: Path | None = Field(None, description="certificate chain, PEM")
    tls_key: Path | None = Field(None, description="private key, PEM")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="largest JSON body")
    max_file_bytes: int = Field(StoreLimits.max_file_bytes, ge=1024, description="largest uploaded file")
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
        StoreLimits.session_idle_s,
        gt=0,
        description="a session of the dashboard ends when it was not used for so long, in seconds",
    )
    session_s: float = Field(
        StoreLimits.session_s, gt=0, description="a session of the dashboard ends after so long in any case, in seconds"
    )

    worker_name: str = Field(
        default_factory=socket.gethostname, min_length=1, description="name under which a worker reports itself"
    )
    worker_address: str = Field("127.0.0.1", description="address at which other hosts of a gang reach this one")
    warm_supervisors: int = Field(
        1,
        ge=0,
        le=64,
        description="idle supervisors kept ready with everything imported that ranks need, so that jobs start sooner",
    )
    stop_grace_s: float = Field(
        10.0, ge=0, description="seconds that ranks get to write a checkpoint when their job is stopped"
    )
    cpu_slots: int | None = Field(
        None, ge=0, le=4096, description="CPU ranks that may run here; one per core, but at least 4, when absent"
    )

    job_isolation: Literal["auto", "required", "none"] = Field(
        "auto",
        description="how ranks are kept from the host and from other jobs: as far as it allows, fully or not at all, "
        "or by limits only; `trivet hosts` tells what each host allows",
    )
    job_memory_gib: float | None = Field(
        None, gt=0, description="private memory of a rank's process, in GiB; all of the host's when absent"
    )
    job_file_gib: float = Field(1024.0, gt=0, description="largest file that a rank may write, in GiB")
    job_processes: int = Field(
        16_384, ge=64, description="processes and threads of a job on a host, where it has a namespace to count them in"
    )
    job_paths: str = Field(
        "",
        description="further files and folders that ranks may read, such as data or packages outside the installation, "
        "separated by colons",
    )
    job_environment: str = Field(
        "",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*)?$",
        description="names of further environment variables that ranks get from their worker, separated by commas",
    )

    lease_s: float = Field(
        StoreLimits.lease_s,
        ge=1,
        le=_DAY_S,
        description="a running part that is silent for so long is lost, in seconds",
    )
    starting_lease_s: float = Field(
        StoreLimits.starting_lease_s,
        ge=1,
        le=_DAY_S,
        description="a placed part that nobody claims for so long is taken back, in seconds",
    )
    heartbeat_s: float = Field(
        StoreLimits.heartbeat_s,
        ge=1,
        le=_DAY_S,
        description="a host that is silent for so long gets no work, in seconds",
    )
    max_queue_bypass_s: float = Field(
        StoreLimits.max_queue_bypass_s,
        ge=0,
        le=365 * _DAY_S,
        description="a job that has waited for longer is never overtaken, in seconds",
    )

    max_lost_attempts: int = Field(
        StoreLimits.max_lost_attempts,
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

    url: str | None = Field(None, description="API that the command line talks to; that of the data folder when absent")
    key: SecretStr | None = Field(None, description="API key that the command line uses at `url`")
    ca_cert: Path | None = Field(
        None, description="certificate, PEM, that `url` must have or be signed by, in place of the system's authorities"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe messages that are logged"
    )

    @model_validator(mode="after")
    def _tls_needs_both(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key come together: give both, or neither")
        return self

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, text: str) -> str:
        for entry in _entries(text):
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(f"{entry!r} is neither an address nor a network: {error}") from None
        return text

    @property
    def proxies(self) -> list[str]:
        """Return the addresses and networks of ``trusted_proxies``."""
        return _entries(self.trusted_proxies)

    @property
    def allowed_host_names(self) -> list[str]:
        """Return the names of ``allowed_hosts``, in lower case."""
        return _entries(self.allowed_hosts.lower())

    @property
    def layout(self) -> DataLayout:
        return DataLayout(self.data.resolve())

    @property
    def store_limits(self) -> StoreLimits:
        """Return the limits of the store that the operator chose; the others are not an operator's to choose."""
        return StoreLimits(
            lease_s=self.lease_s,
            starting_lease_s=self.starting_lease_s,
            heartbeat_s=self.heartbeat_s,
            max_queue_bypass_s=self.max_queue_bypass_s,
            max_lost_attempts=self.max_lost_attempts,
            max_file_bytes=self.max_file_bytes,
            session_idle_s=self.session_idle_s,
            session_s=self.session_s,
        )

    @property
    def admin_key_file(self) -> Path:
        """Return where the first admin key is kept, readable by its owner only."""
        return self.layout.admin_key

    @property
    def broker_url(self) -> str:
        """Return the broker to connect to: ``redis_url``, else the embedded one's socket in the data folder."""
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
class _SettingLine:
    """One setting as ``trivet settings`` lists it. ``source`` is ``default``, ``environment`` or the file's path."""

    name: str
    variable: str
    value: str
    default: str
    source: str
    description: str


def in_file() -> dict[str, Any]:
    """Return the settings that the TOML file gives, whether or not the environment overrides them."""
    path = config_file()
    return {} if path is None else tomllib.loads(path.read_text())


def sources() -> dict[str, str]:
    """Return where each setting that somebody chose comes from, by its name: ``environment``, or the file's path."""
    set_outside = {name.upper() for name, value in os.environ.items() if value}
    chosen = dict.fromkeys(in_file(), str(config_file()))
    return chosen | {
        name: "environment" for name in Settings.model_fields if (ENV_PREFIX + name).upper() in set_outside
    }


def describe(settings: Settings) -> list[_SettingLine]:
    """Return every setting, in the order of their declaration; secrets are masked."""
    chosen = sources()
    lines = []
    for name, field in Settings.model_fields.items():
        variable = (ENV_PREFIX + name).upper()
        source = chosen.get(name, "default")
        default = field.get_default(call_default_factory=True, validated_data={})
        lines.append(
            _SettingLine(
                name, variable, _shown(getattr(settings, name)), _shown(default), source, field.description or ""
            )
        )
    return lines


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _shown(value: object) -> str:
    return "" if value is None else str(value)
