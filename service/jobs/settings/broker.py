"""Settings of the data folder and the broker."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, SecretStr, model_validator

from service.jobs.files import DataLayout
from service.jobs.host import ENV_PREFIX
from service.jobs.settings.broker_url import BrokerIdentity, broker_url


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
        None, description="PEM certificate of a rediss:// broker or of its authority, besides the system's authorities"
    )
    broker_tls_cert: Path | None = Field(None, description="certificate chain, PEM, to show to a rediss:// broker")
    broker_tls_key: Path | None = Field(None, description="private key, PEM, of `broker_tls_cert`")

    broker_fsync: Literal["always", "everysec", "no"] = Field(
        "always",
        description="when the embedded broker syncs to disk: before it answers, every second, or when the system does",
    )

    broker_wait_s: float = Field(
        10.0, ge=0, le=300, description="seconds for which requests wait for a broker that restarts"
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
