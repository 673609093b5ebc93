"""Composes a broker's URL: its address, the user, and the certificates of both sides.

All of it travels as one URL, from the settings to the store, to Celery and, in a pipe, to supervisors. TLS is always
verified: the chain, the dates and the name, before anything is sent. Nothing switches that off.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

_SCHEMES = ("redis", "rediss", "unix")
_TLS_FILES = {"ca_cert": "ssl_ca_certs", "tls_cert": "ssl_certfile", "tls_key": "ssl_keyfile"}
"""Our names, and the names of redis-py's and Celery's parameters in a URL."""
_VERIFIED = {"ssl_cert_reqs": "required", "ssl_check_hostname": "true"}


@dataclass(frozen=True)
class BrokerIdentity:
    """The user who connects, and how to verify the broker; absent fields are not used."""

    user: str | None = None
    password: str | None = None
    ca_cert: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


def broker_url(address: str, identity: BrokerIdentity) -> str:
    """Return ``address`` with this identity, which overrides the address's own.

    Raises ``ValueError`` for an address that is not a broker's, for certificates without TLS, and for
    parameters that would weaken its verification. The message never repeats the address, which may hold a
    password.
    """
    _check_address(address)
    parts = urlsplit(address)
    files = {
        parameter: str(path.resolve())
        for name, parameter in _TLS_FILES.items()
        if (path := getattr(identity, name)) is not None
    }
    if files and parts.scheme != "rediss":
        raise ValueError(f"certificates of the broker need a rediss:// address; this one is {parts.scheme}://")
    location = parts.netloc.rpartition("@")[2]
    user = parts.username or "" if identity.user is None else quote(identity.user, safe="")
    password = parts.password or "" if identity.password is None else quote(identity.password, safe="")
    credentials = f"{user}:{password}@" if user or password else ""
    query = {**_parameters(parts.query), **files, **(_VERIFIED if parts.scheme == "rediss" else {})}
    return f"{parts.scheme}://{credentials}{location}{parts.path}{'?' if query else ''}{urlencode(query)}"


def _check_address(address: str) -> None:
    """Raise ``ValueError`` if an address is not a broker's; the message does not repeat it."""
    parts = urlsplit(address)
    if parts.scheme not in _SCHEMES:
        raise ValueError("not a broker's address: it begins with redis://, rediss:// (TLS) or unix://")
    try:
        port_is_fine = parts.port != 0
    except ValueError:
        port_is_fine = False
    if parts.fragment or not port_is_fine or (parts.scheme != "unix" and not parts.hostname):
        raise ValueError(
            "not a broker's address such as redis://broker:6379/0: if the password has /, #, ?, @ or %, give it in a "
            "file, with TRIVET_BROKER_PASSWORD_FILE"
        )
    unverified = {name for name, value in _parameters(parts.query).items() if _VERIFIED.get(name, value) != value}
    if unverified:
        raise ValueError(
            f"{', '.join(sorted(unverified))}: a broker's certificate is always verified; name the one that it is "
            "signed by, or its own, with TRIVET_BROKER_CA_CERT"
        )


def tls_options(url: str) -> dict[str, Any] | None:
    """Return the TLS options of redis-py's connections, all verified, for a URL of :func:`broker_url`; ``None`` where
    the URL has no TLS.
    """
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return None
    files = {name: value for name, value in _parameters(parts.query).items() if name in _TLS_FILES.values()}
    return {**files, "ssl_cert_reqs": "required", "ssl_check_hostname": True}


def _parameters(query: str) -> Mapping[str, str]:
    return {name: values[-1] for name, values in parse_qs(query).items()}


class NoInvitation(ValueError):  # noqa: N818
    """The text is not an invitation; the message does not repeat it."""


@dataclass(frozen=True)
class Invitation:
    """A host's access to the broker: its address, user and certificate."""

    url: str
    """The broker's address, without user and password."""
    user: str
    password: str
    ca_cert: str | None = None
    """PEM of the authority that signed the broker's certificate, if hosts do not know it."""

    def __post_init__(self) -> None:
        _check_address(self.url)
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
        """Parse the text that :meth:`__str__` wrote. Raises :class:`NoInvitation`."""
        token, _, url = text.strip().partition("@")
        try:
            return cls(url=url, **json.loads(base64.b64decode(token.encode(), b"-_", validate=True)))
        except (binascii.Error, ValueError, TypeError) as error:
            why = "it was cut off, or is no output of `trivet broker invite`"
            raise NoInvitation(f"not an invitation TOKEN@URL: {why} ({type(error).__name__})") from None
