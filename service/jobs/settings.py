"""Settings of the service: each one an environment variable ``TRIVET_…`` or a line of a TOML file.

The environment wins over the file. The file is ``TRIVET_CONFIG``, else ``trivet.toml`` in the working directory
when it exists. ``trivet settings`` lists every setting with its value and where it came from.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from service.jobs.broker_url import BrokerIdentity, broker_url
from service.jobs.launchers import LAUNCHER_NAME, LOCAL
from service.jobs.layout import DataLayout
from service.jobs.logs import LogFormat
from service.jobs.settings_file import ENV_PREFIX, config_file, in_file
from service.jobs.sign_in import parse_rules
from service.jobs.spec.exports import leads_to_a_server
from service.jobs.store_limits import StoreLimits

_DAY_S = 86_400.0
MAX_LOG_BYTES = 256 << 20
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Settings(BaseSettings):
    """Lets an operator choose; each field is a setting with its default, its bounds and its description."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,  # what is refused may hold a password
    )

    data: Path = Field(Path(".trivet"), description="folder of jobs, files and the embedded broker")
    redis_url: SecretStr | None = Field(
        None, description="Redis or Valkey to use, redis:// or, with TLS, rediss://; the embedded one when absent"
    )
    broker_user: str | None = Field(None, min_length=1, description="user at `redis_url`; that in the URL when absent")
    broker_password: SecretStr | None = Field(
        None, description="password at `redis_url`, as it is; that in the URL when absent"
    )
    broker_password_file: Path | None = Field(
        None, description="file that holds the password at `redis_url`, in place of `broker_password`"
    )
    broker_ca_cert: Path | None = Field(
        None,
        description="certificate, PEM, that a rediss:// broker must have or be signed by, besides the system's "
        "authorities",
    )
    broker_tls_cert: Path | None = Field(None, description="certificate chain, PEM, to show to a rediss:// broker")
    broker_tls_key: Path | None = Field(None, description="private key, PEM, of `broker_tls_cert`")

    broker_fsync: Literal["always", "everysec", "no"] = Field(
        "always",
        description="when the embedded broker syncs to disk: before it answers, every second, or when the system does",
    )

    broker_wait_s: float = Field(
        10.0,
        ge=0,
        le=300,
        description="requests wait for a broker that restarts until so long after it went, in seconds",
    )

    admin_key_file: Path | None = Field(
        None,
        description="file that the first admin key is written to, such as one that workers cannot read; `admin.key` in "
        "the data folder when absent",
    )

    host: str = Field("127.0.0.1", description="address that the API binds")
    api_processes: int = Field(1, ge=1, le=64, description="API processes of `trivet up`, which share its port")
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
    response_read_s: float = Field(
        30.0,
        gt=0,
        description="seconds within which a client must take each 10 kB that wait for it; slower ones are cut off",
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

    max_key_days: float | None = Field(
        None,
        gt=0,
        le=36_500,
        description="API keys are made for so many days at most, and for so many when they name no end; the first "
        "admin key, and keys made before, are not limited",
    )

    webhook_allow: str = Field(
        "",
        description="addresses or networks, by comma, that webhooks may be sent to though they are not public, and "
        "without TLS",
    )
    webhook_retry_hours: float = Field(
        72.0, gt=0, le=24 * 30, description="for so long a delivery of a webhook is tried again, in hours"
    )
    webhook_disable_days: float = Field(
        5.0, gt=0, description="a webhook all of whose deliveries fail for so many days is disabled"
    )

    export_mlflow: str | None = Field(
        None, description="MLflow tracking server that is told of jobs whose specs name none"
    )
    export_tensorboard: bool | None = Field(
        None, description="event files for TensorBoard are written of jobs whose specs do not say whether"
    )
    export_otlp: str | None = Field(
        None, description="OpenTelemetry collector that is told of jobs whose specs name none"
    )
    export_tokens: SecretStr | None = Field(
        None,
        description="`host=token` or `host:port=token`, by comma: what servers that jobs are exported to get as bearer "
        "token",
    )
    export_retry_hours: float = Field(
        24.0, gt=0, le=24 * 30, description="for so long an export of an ended job is tried again, in hours"
    )

    session_idle_s: float = Field(
        StoreLimits.session_idle_s,
        gt=0,
        description="a session of the dashboard ends when it was not used for so long, in seconds",
    )
    session_s: float = Field(
        StoreLimits.session_s, gt=0, description="a session of the dashboard ends after so long in any case, in seconds"
    )

    oidc_issuer: str | None = Field(
        None,
        description="OpenID Connect provider that people may sign in to the dashboard with, such as https://host/x",
    )
    oidc_client_id: str | None = Field(None, description="what the provider knows this service by")
    oidc_client_secret: SecretStr | None = Field(
        None, description="secret that the provider has given this service; a public client has none"
    )
    oidc_roles: str = Field(
        "",
        description="what groups may do, the first match counts: GROUP=PROJECT:ROLE; GROUP=operator; *=PROJECT:ROLE, "
        "where * is everybody who signs in",
    )
    oidc_owner_claim: str = Field(
        "email", min_length=1, description="claim that names the owner of a person's jobs; nobody may change their own"
    )
    oidc_groups_claim: str = Field("groups", min_length=1, description="claim that lists a person's groups")
    oidc_scopes: str = Field(
        "openid email profile", pattern=r"(^| )openid( |$)", description="scopes that the provider is asked for"
    )
    oidc_name: str = Field(
        "OpenID Connect",
        min_length=1,
        max_length=60,
        description="what the button on the sign-in page calls the provider",
    )

    worker_name: str = Field(
        default_factory=socket.gethostname, min_length=1, description="name under which a worker reports itself"
    )
    worker_address: str | None = Field(
        None,
        description="address at which other hosts of a gang reach this one; the one from which it reaches the broker "
        "when absent",
    )
    launcher: str = Field(
        LOCAL,
        pattern=LAUNCHER_NAME.pattern,
        description="what gives devices to jobs that name no launcher: `local`, the hosts of the service, or a "
        "scheduler's",
    )
    launchers: str = Field(
        "",
        pattern=r"^([a-z]{2,20}(,[a-z]{2,20})*)?$",
        description="launchers that this worker asks for devices besides offering its own, by comma, such as `slurm`",
    )
    slurm_options: str = Field(
        "", description="further options of sbatch for the launcher `slurm`, such as --partition=gpu --account=lab"
    )
    ray_options: str = Field(
        "",
        description="for the launcher `ray`, such as --address=http://head:8265 and further resources of each device, "
        "--resources='{\"accelerator_type:H100\": 0.001}'",
    )
    kubernetes_options: str = Field(
        "",
        description="for the launcher `kubernetes`, first of all --template=FILE and --namespace=NAME, and "
        "--queue=NAME with Kueue",
    )
    stop_jobs: bool = Field(
        False,
        description="a worker that is stopped stops its jobs first, which write a checkpoint and go back to the queue, "
        "as in a container, whose end ends all that is in it; else they go on without their worker",
    )
    warm_supervisors: int = Field(
        1,
        ge=0,
        le=64,
        description="whether the worker keeps a process that has imported everything that ranks need, from which the "
        "processes of jobs are forked, so that they start sooner: 0 is no, any other number yes",
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

    quota_window_h: int = Field(
        StoreLimits.quota_window_h,
        ge=1,
        le=744,
        description="Quotas of device-hours count those of so many hours, the current one included.",
    )
    fair_share_half_life_s: float = Field(
        StoreLimits.fair_share_half_life_s,
        ge=1,
        le=365 * _DAY_S,
        description="what a project has used counts half as much after so long, against other projects, in seconds",
    )
    fair_share_bound_s: float | None = Field(
        None,
        ge=0,
        le=365 * _DAY_S,
        description="a job that has waited for longer is no longer overtaken by projects that used less, in seconds; "
        "max_queue_bypass_s when absent",
    )

    preemption_min_run_s: float = Field(
        StoreLimits.preemption_min_run_s,
        ge=0,
        le=365 * _DAY_S,
        description="a preemptible job has run for so long before it may be asked to make room, in seconds",
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

    max_audit_bytes: int = Field(
        StoreLimits.max_audit_bytes,
        ge=16 << 20,
        description="the files of the audit log may have so many bytes; the oldest entries are deleted beyond",
    )

    keep_uploads_days: float | None = Field(
        StoreLimits.keep_uploads_days,
        ge=0,
        description="an upload is deleted when no job was submitted with it for so many days; 0 keeps all",
    )

    max_job_artifacts: int = Field(
        StoreLimits.max_job_artifacts, ge=1, le=1_000_000, description="artifacts of one job; more are not taken"
    )
    max_job_artifact_bytes: int = Field(
        StoreLimits.max_job_artifact_bytes,
        ge=1 << 20,
        description="bytes of all artifacts of one job, folders included; more are not taken",
    )
    max_log_bytes: int = Field(
        MAX_LOG_BYTES,
        ge=1 << 16,
        description="bytes kept of what a rank prints in an attempt: the first quarter, and the newest of the rest",
    )
    max_cache_bytes: int = Field(
        20 << 30,
        ge=0,
        description="what jobs make of uploaded files, and on each host what they compile and trace, is deleted "
        "beyond so many bytes each, the longest unused first",
    )

    url: str | None = Field(None, description="API that the command line talks to; that of the data folder when absent")
    key: SecretStr | None = Field(None, description="API key that the command line uses at `url`")
    ca_cert: Path | None = Field(
        None, description="certificate, PEM, that `url` must have or be signed by, in place of the system's authorities"
    )

    outage_s: float = Field(
        60.0,
        ge=0,
        le=_DAY_S,
        description="commands outlast an outage of the service of so many seconds",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe messages that are logged"
    )
    log_format: LogFormat = Field(
        "text", description="how API and workers log: text for people, or json with one object a line"
    )

    @model_validator(mode="after")
    def _tls_needs_both(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key come together: give both, or neither")
        return self

    @model_validator(mode="after")
    def _broker_can_be_addressed(self) -> Settings:
        if (self.broker_tls_cert is None) != (self.broker_tls_key is None):
            raise ValueError("broker_tls_cert and broker_tls_key come together: give both, or neither")
        if self.broker_password is not None and self.broker_password_file is not None:
            raise ValueError("broker_password and broker_password_file exclude each other: give one")
        if self.redis_url is not None:
            broker_url(self.redis_url.get_secret_value(), self._broker_identity(None))
        return self

    @field_validator("trusted_proxies", "webhook_allow")
    @classmethod
    def _are_addresses(cls, text: str) -> str:
        for entry in _entries(text):
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(f"{entry!r} is neither an address nor a network: {error}") from None
        return text

    @field_validator("oidc_issuer")
    @classmethod
    def _is_secure(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "")
        on_this_host = parts.scheme == "http" and parts.hostname in LOOPBACK
        if url is not None and not (parts.hostname and (parts.scheme == "https" or on_this_host)):
            raise ValueError(f"{url!r} is not the address of an issuer: https://…, or http:// on this host only")
        return url

    @field_validator("oidc_roles")
    @classmethod
    def _are_rules(cls, text: str) -> str:
        parse_rules(text)
        return text

    @model_validator(mode="after")
    def _oidc_is_complete(self) -> Settings:
        if self.oidc_issuer is not None and not (self.oidc_client_id and self.oidc_roles):
            raise ValueError("oidc_issuer needs oidc_client_id, and oidc_roles, without which nobody may sign in")
        return self

    @property
    def proxies(self) -> list[str]:
        """Return the addresses and networks of ``trusted_proxies``."""
        return _entries(self.trusted_proxies)

    @property
    def webhook_networks(self) -> list[str]:
        """Return the addresses and networks of ``webhook_allow``."""
        return _entries(self.webhook_allow)

    @model_validator(mode="after")
    def _exports_lead_to_servers(self) -> Settings:
        for name in ("export_mlflow", "export_otlp"):
            url = getattr(self, name)
            if url is not None and not leads_to_a_server(url):
                raise ValueError(f"{name} is no URL of a server, without user, password, query and fragment")
        if any("=" not in entry for entry in _entries(self._tokens)):
            raise ValueError("export_tokens has an entry without `=`; expected host=token, by comma")
        return self

    @property
    def _tokens(self) -> str:
        return "" if self.export_tokens is None else self.export_tokens.get_secret_value()

    @property
    def bearer_tokens(self) -> dict[str, str]:
        """Return by host, or host and port, what servers that jobs are exported to get as bearer token."""
        pairs = (entry.partition("=") for entry in _entries(self._tokens))
        return {host.strip().lower(): token.strip() for host, _, token in pairs}

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
            launcher=self.launcher,
            lease_s=self.lease_s,
            starting_lease_s=self.starting_lease_s,
            heartbeat_s=self.heartbeat_s,
            max_queue_bypass_s=self.max_queue_bypass_s,
            fair_share_half_life_s=self.fair_share_half_life_s,
            quota_window_h=self.quota_window_h,
            fair_share_bound_s=self.fair_share_bound_s,
            preemption_min_run_s=self.preemption_min_run_s,
            max_lost_attempts=self.max_lost_attempts,
            max_file_bytes=self.max_file_bytes,
            max_job_artifacts=self.max_job_artifacts,
            max_job_artifact_bytes=self.max_job_artifact_bytes,
            keep_uploads_days=self.keep_uploads_days or None,
            max_key_s=None if self.max_key_days is None else self.max_key_days * _DAY_S,
            session_idle_s=self.session_idle_s,
            session_s=self.session_s,
            max_audit_bytes=self.max_audit_bytes,
            export_mlflow=self.export_mlflow,
            export_tensorboard=self.export_tensorboard,
            export_otlp=self.export_otlp,
        )

    @property
    def admin_key_path(self) -> Path:
        """Return where the first admin key is kept, readable by its owner only."""
        return self.admin_key_file or self.layout.admin_key

    @property
    def broker_url(self) -> str:
        """Return the broker to connect to: ``redis_url`` with user, password and certificates in it, else the embedded
        one's socket in the data folder. Raises ``OSError`` for a file of the password, or of a certificate, that cannot
        be read.
        """
        if self.redis_url is None:
            return f"unix://{self.layout.broker / 'broker.sock'}"
        for name in ("broker_ca_cert", "broker_tls_cert", "broker_tls_key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"{ENV_PREFIX}{name.upper()}={path}: there is no such file")
        given = None if self.broker_password is None else self.broker_password.get_secret_value()
        password = given if self.broker_password_file is None else self.broker_password_file.read_text().strip()
        return broker_url(self.redis_url.get_secret_value(), self._broker_identity(password))

    def _broker_identity(self, password: str | None) -> BrokerIdentity:
        return BrokerIdentity(
            self.broker_user, password, self.broker_ca_cert, self.broker_tls_cert, self.broker_tls_key
        )

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
