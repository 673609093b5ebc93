"""Settings of sessions and of signing in."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from service.jobs.accounts import parse_rules
from service.jobs.records.store_limits import StoreLimits

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_LONGEST_S = 1_000 * 365 * 86_400.0


class SignInSettings(BaseModel):
    """How long a session lasts, and the provider that people sign in with."""

    session_idle_s: float = Field(
        StoreLimits.session_idle_s,
        gt=0,
        le=_LONGEST_S,
        description="seconds without use after which a session of the dashboard ends",
    )
    session_s: float = Field(
        StoreLimits.session_s,
        gt=0,
        le=_LONGEST_S,
        description="seconds after which a session of the dashboard ends in any case",
    )

    oidc_issuer: str | None = Field(
        None, description="OpenID Connect provider for signing in to the dashboard, such as https://host/x"
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
