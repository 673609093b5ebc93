"""Settings of webhooks and exports."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, model_validator

from service.jobs.settings.words import Addresses, Network, entries, networks
from service.jobs.spec.common import OFFLINE, leads_to_a_server


class DeliverySettings(BaseModel):
    """The targets of webhooks and exports, and how long each is tried."""

    webhook_allow: Addresses = Field(
        "", description="further addresses or networks, by comma, to which webhooks may go, even without TLS"
    )
    webhook_retry_hours: float = Field(
        72.0, gt=0, le=24 * 30, description="hours for which a webhook's delivery is tried again"
    )
    webhook_disable_days: float = Field(
        5.0, gt=0, description="days of failed deliveries after which a webhook is disabled"
    )

    smtp_url: SecretStr | None = Field(
        None,
        description="server that sends e-mail: smtps://USER:PASSWORD@HOST (TLS), smtp://… (STARTTLS), or "
        "smtp+plain://HOST, a relay on this network without either; no e-mail when absent",
    )
    smtp_from: str | None = Field(None, description="sender of e-mail, such as trivet@example.org")
    smtp_to: str = Field(
        "", description="who may be sent e-mail, by comma: addresses, or @example.org for all of a domain"
    )

    export_mlflow: str | None = Field(None, description="MLflow tracking server for jobs whose specs name none")
    export_tensorboard: bool | None = Field(
        None, description="whether to write TensorBoard event files for jobs whose specs do not say"
    )
    export_otlp: str | None = Field(None, description="OpenTelemetry collector for jobs whose specs name none")
    export_wandb: str | None = Field(
        None, description="Weights & Biases server, or `offline`, for jobs whose specs name none"
    )
    export_tokens: SecretStr | None = Field(
        None,
        description="`URL=token`, by comma: bearer tokens, and keys of Weights & Biases, for the servers of exports, "
        "sent to that scheme, host and port, and to no path but the URL's and those below it",
    )
    export_retry_hours: float = Field(
        24.0, gt=0, le=24 * 30, description="hours for which the export of an ended job is tried again"
    )

    @property
    def webhook_networks(self) -> list[Network]:
        """Return the addresses and networks of ``webhook_allow``."""
        return networks(self.webhook_allow)

    @model_validator(mode="after")
    def _mail_is_whole(self) -> Self:
        if self.smtp_url is None:
            return self
        parts = urlsplit(self.smtp_url.get_secret_value())
        if parts.scheme not in ("smtps", "smtp", "smtp+plain") or not parts.hostname:
            raise ValueError("smtp_url names no mail server; expected smtps://, smtp:// or smtp+plain://, and a host")
        if parts.scheme == "smtp+plain" and parts.username:
            raise ValueError("smtp_url has a password, which smtp+plain:// would send as it is; expected smtps or smtp")
        for name in ("smtp_from", "smtp_to"):
            if not getattr(self, name):
                raise ValueError(
                    f"{name} is missing, which smtp_url needs; expected an address such as ada@example.org"
                )
        return self

    @property
    def mail_recipients(self) -> list[str]:
        """Return the addresses, and the domains with their @, that may be sent e-mail."""
        return [entry.lower() for entry in entries(self.smtp_to)] if self.smtp_url is not None else []

    @model_validator(mode="after")
    def _exports_lead_to_servers(self) -> Self:
        for name in ("export_mlflow", "export_otlp", "export_wandb"):
            url = getattr(self, name)
            if url is not None and not leads_to_a_server(url) and (name, url) != ("export_wandb", OFFLINE):
                raise ValueError(f"{name} is no URL of a server, without user, password, query and fragment")
        expected = "expected URL=token, by comma, such as https://mlflow.example.com=TOKEN"
        if any("=" not in entry for entry in entries(self._tokens)):
            raise ValueError(f"export_tokens has an entry without `=`; {expected}")
        if unclear := [url for url in self.bearer_tokens if not leads_to_a_server(url)]:
            raise ValueError(f"export_tokens names {unclear[0]!r}, which is no URL of a server; {expected}")
        return self

    @model_validator(mode="after")
    def _wandb_has_a_key(self) -> Self:
        url = self.export_wandb
        if url not in (None, OFFLINE) and url not in self.bearer_tokens:
            raise ValueError(f"export_wandb has no key; expected {url}=KEY in export_tokens")
        return self

    @property
    def _tokens(self) -> str:
        return "" if self.export_tokens is None else self.export_tokens.get_secret_value()

    @property
    def bearer_tokens(self) -> dict[str, str]:
        """Return the bearer tokens of export servers, by URL."""
        pairs = (entry.partition("=") for entry in entries(self._tokens))
        return {url.strip(): token.strip() for url, _, token in pairs}
