"""Invites a host: one line has the broker's address, the host's user and password there, and its certificate's signer.

``TOKEN@URL``, where the token is base64url of JSON. It is as secret as the password that it holds.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from service.jobs.broker_url import check_address


class NoInvitation(ValueError):  # noqa: N818
    """The text is no invitation; the message does not repeat it."""


@dataclass(frozen=True)
class Invitation:
    """Tells a host how to speak to the broker, and as whom."""

    url: str
    """The broker's address, without user and password."""
    user: str
    password: str
    ca_cert: str | None = None
    """PEM of the authority that signed the broker's certificate, where hosts do not know it."""

    def __post_init__(self) -> None:
        check_address(self.url)
        parts = urlsplit(self.url)
        if parts.scheme == "unix" or "@" in parts.netloc:
            raise ValueError(
                "expected the address at which hosts reach the broker, without a user: rediss://NAME:6379/0"
            )
        if self.ca_cert is not None and parts.scheme != "rediss":
            raise ValueError("a certificate needs a rediss:// address")

    def __str__(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if name != "url" and value is not None}
        return f"{base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()}@{self.url}"

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Return what :meth:`__str__` wrote. Raises :class:`NoInvitation`."""
        token, _, url = text.strip().partition("@")
        try:
            return cls(url=url, **json.loads(base64.b64decode(token.encode(), b"-_", validate=True)))
        except (binascii.Error, ValueError, TypeError) as error:
            why = "it was cut off, or is no output of `trivet broker invite`"
            raise NoInvitation(f"not an invitation TOKEN@URL: {why} ({type(error).__name__})") from None
