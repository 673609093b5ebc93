"""Groups settings by subject: each group is a base class of :class:`service.jobs.settings.Settings`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from service.jobs.accounts import parse_rules
from service.jobs.files import DataLayout
from service.jobs.host import ENV_PREFIX
from service.jobs.records.store_limits import StoreLimits
from service.jobs.settings.broker_url import BrokerIdentity, broker_url
from service.jobs.spec.common import leads_to_a_server


def _entries(text: str) -> list[str]:
    """Return the items of a comma-separated setting."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _addresses(text: str) -> str:
    """Return a list of addresses and networks. Raises ``ValueError`` with the entry that is neither."""
    for entry in _entries(text):
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            raise ValueError(f"{entry!r} is neither an address nor a network: {error}") from None
    return text


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
    trusted_proxies: str = Field(
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
        2.0, ge=0.125, description="memory to check one submitted job and its files, in GiB"
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

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_addresses(cls, text: str) -> str:
        return _addresses(text)

    @property
    def proxies(self) -> list[str]:
        """Return the addresses and networks of ``trusted_proxies``."""
        return _entries(self.trusted_proxies)

    @property
    def allowed_host_names(self) -> list[str]:
        """Return the names of ``allowed_hosts``, in lower case."""
        return _entries(self.allowed_hosts.lower())


class BrokerSettings(BaseModel):
    """The folders of jobs, and the broker that holds their state."""

    data: Path = Field(Path(".trivet"), description="folder of jobs, files and the embedded broker")
    store: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://.",
        description="object store for artifacts, checkpoints and uploads of hosts that share no folder, as an fsspec "
        "URL such as s3://bucket/prefix; the same for API and workers",
    )
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
        description="PEM certificate of a rediss:// broker or of its authority, besides the system's authorities",
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
        description="seconds for which requests wait for a broker that restarts",
    )

    @model_validator(mode="after")
    def _broker_can_be_addressed(self) -> Self:
        if (self.broker_tls_cert is None) != (self.broker_tls_key is None):
            raise ValueError("broker_tls_cert and broker_tls_key come together: give both, or neither")
        if self.broker_password is not None and self.broker_password_file is not None:
            raise ValueError("broker_password and broker_password_file exclude each other: give one")
        if self.redis_url is not None:
            broker_url(self.redis_url.get_secret_value(), self._broker_identity(None))
        return self

    @property
    def layout(self) -> DataLayout:
        return DataLayout(self.data.resolve())

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


class DeliverySettings(BaseModel):
    """The targets of webhooks and exports, and how long each is tried."""

    webhook_allow: str = Field(
        "",
        description="further addresses or networks, by comma, to which webhooks may go, even without TLS",
    )
    webhook_retry_hours: float = Field(
        72.0, gt=0, le=24 * 30, description="hours for which a webhook's delivery is tried again"
    )
    webhook_disable_days: float = Field(
        5.0, gt=0, description="days of failed deliveries after which a webhook is disabled"
    )

    export_mlflow: str | None = Field(None, description="MLflow tracking server for jobs whose specs name none")
    export_tensorboard: bool | None = Field(
        None, description="whether to write TensorBoard event files for jobs whose specs do not say"
    )
    export_otlp: str | None = Field(None, description="OpenTelemetry collector for jobs whose specs name none")
    export_tokens: SecretStr | None = Field(
        None,
        description="`URL=token`, by comma: bearer tokens for the servers of exports, sent to that scheme, host and "
        "port, and to no path but the URL's and those below it",
    )
    export_retry_hours: float = Field(
        24.0, gt=0, le=24 * 30, description="hours for which the export of an ended job is tried again"
    )

    @field_validator("webhook_allow")
    @classmethod
    def _webhooks_lead_to_addresses(cls, text: str) -> str:
        return _addresses(text)

    @property
    def webhook_networks(self) -> list[str]:
        """Return the addresses and networks of ``webhook_allow``."""
        return _entries(self.webhook_allow)

    @model_validator(mode="after")
    def _exports_lead_to_servers(self) -> Self:
        for name in ("export_mlflow", "export_otlp"):
            url = getattr(self, name)
            if url is not None and not leads_to_a_server(url):
                raise ValueError(f"{name} is no URL of a server, without user, password, query and fragment")
        expected = "expected URL=token, by comma, such as https://mlflow.example.com=TOKEN"
        if any("=" not in entry for entry in _entries(self._tokens)):
            raise ValueError(f"export_tokens has an entry without `=`; {expected}")
        if unclear := [url for url in self.bearer_tokens if not leads_to_a_server(url)]:
            raise ValueError(f"export_tokens names {unclear[0]!r}, which is no URL of a server; {expected}")
        return self

    @property
    def _tokens(self) -> str:
        return "" if self.export_tokens is None else self.export_tokens.get_secret_value()

    @property
    def bearer_tokens(self) -> dict[str, str]:
        """Return the bearer tokens of export servers, by URL."""
        pairs = (entry.partition("=") for entry in _entries(self._tokens))
        return {url.strip(): token.strip() for url, _, token in pairs}


LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class SignInSettings(BaseModel):
    """How long a session lasts, and the provider that people sign in with."""

    session_idle_s: float = Field(
        StoreLimits.session_idle_s,
        gt=0,
        description="seconds without use after which a session of the dashboard ends",
    )
    session_s: float = Field(
        StoreLimits.session_s, gt=0, description="seconds after which a session of the dashboard ends in any case"
    )

    oidc_issuer: str | None = Field(
        None,
        description="OpenID Connect provider for signing in to the dashboard, such as https://host/x",
    )
    oidc_client_id: str | None = Field(None, description="this service's client id at the provider")
    oidc_client_secret: SecretStr | None = Field(
        None, description="this service's client secret at the provider; a public client has none"
    )
    oidc_roles: str = Field(
        "",
        description="roles of groups, of which the first match counts: GROUP=PROJECT:ROLE; GROUP=operator; "
        "*=PROJECT:ROLE, where * is everybody who signs in",
    )
    oidc_owner_claim: str = Field(
        "email",
        min_length=1,
        description="claim that names the owner of a person's jobs; people must not be able to change it",
    )
    oidc_groups_claim: str = Field("groups", min_length=1, description="claim that lists a person's groups")
    oidc_scopes: str = Field(
        "openid email profile", pattern=r"(^| )openid( |$)", description="scopes to request from the provider"
    )
    oidc_name: str = Field(
        "OpenID Connect",
        min_length=1,
        max_length=60,
        description="the provider's name on the button of the sign-in page",
    )

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
    def _oidc_is_complete(self) -> Self:
        if self.oidc_issuer is not None and not (self.oidc_client_id and self.oidc_roles):
            raise ValueError("oidc_issuer needs oidc_client_id, and oidc_roles, without which nobody may sign in")
        return self
