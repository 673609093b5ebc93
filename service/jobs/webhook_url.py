"""Says what can be said of a webhook's URL without resolving it."""

from __future__ import annotations

from urllib.parse import urlsplit

_SCHEMES = ("https", "http")


def check_url(url: str) -> None:
    """Check what can be said of a URL without resolving it. Raises ``ValueError`` with what would be accepted."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        raise ValueError("an https:// URL with a host") from None
    if parts.scheme not in _SCHEMES or not parts.hostname or not has_port:
        raise ValueError("an https:// URL with a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL without user and password: deliveries are signed")
    if parts.fragment:
        raise ValueError("a URL without a fragment")
