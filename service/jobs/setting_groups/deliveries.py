"""Settings of what the service sends of its own accord: webhooks and exports."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from service.jobs.setting_groups.api import addresses, entries
from service.jobs.spec.exports import leads_to_a_server


class DeliverySettings(BaseModel):
    """Where webhooks may lead, what is exported, and for how long either is tried."""

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

    @field_validator("webhook_allow")
    @classmethod
    def _webhooks_lead_to_addresses(cls, text: str) -> str:
        return addresses(text)

    @property
    def webhook_networks(self) -> list[str]:
        """Return the addresses and networks of ``webhook_allow``."""
        return entries(self.webhook_allow)

    @model_validator(mode="after")
    def _exports_lead_to_servers(self) -> Self:
        for name in ("export_mlflow", "export_otlp"):
            url = getattr(self, name)
            if url is not None and not leads_to_a_server(url):
                raise ValueError(f"{name} is no URL of a server, without user, password, query and fragment")
        if any("=" not in entry for entry in entries(self._tokens)):
            raise ValueError("export_tokens has an entry without `=`; expected host=token, by comma")
        return self

    @property
    def _tokens(self) -> str:
        return "" if self.export_tokens is None else self.export_tokens.get_secret_value()

    @property
    def bearer_tokens(self) -> dict[str, str]:
        """Return the bearer tokens of export servers, by host, or by host and port."""
        pairs = (entry.partition("=") for entry in entries(self._tokens))
        return {host.strip().lower(): token.strip() for host, _, token in pairs}
