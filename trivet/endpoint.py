"""Finds the service and the key of a client: a key goes only to the service that it was given for.

Arguments, environment variables and the file that ``TRIVET_CONFIG`` names are explicit. A ``trivet.toml`` in
the working folder may name a service with its own key; it never decides where another key goes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from service.jobs.host import ENV_PREFIX, NotPrivateError, check_owned, in_file, read_private
from service.jobs.settings import LOOPBACK, Settings, sources
from trivet.errors import TrivetError

_KEY = re.compile(r"[!-~]+")


class MisdirectedKey(TrivetError):  # noqa: N818
    """The key belongs to another address than the chosen one; it was not sent."""


@dataclass(frozen=True)
class Endpoint:
    """An address, ``http://``, ``https://`` or ``unix://``, and the key to send there.

    ``advice`` tells a user with a refused key where the key came from; it is empty if the caller chose both.
    """

    url: str
    key: str | None
    ca_cert: Path | None = None
    advice: str | None = None


@dataclass(frozen=True)
class _ChosenSetting:
    """One chosen value and its source: ``argument``, ``environment``, or a file's path."""

    value: str
    source: str
    found: bool
    """Whether it came from a file in the working folder."""


def resolve(url: str | None, key: str | None) -> Endpoint:
    """Return the endpoint for a client's arguments and this process's settings.

    Without any address, it is the data folder's service, through the socket there, whose owner the kernel
    confirms. Raises :class:`MisdirectedKey`, and :class:`TrivetError` for an invalid address or key.
    """
    settings, chosen = Settings(), sources()
    address = _choice("url", url, settings.url, chosen)
    secret = _choice("key", key, settings.key.get_secret_value() if settings.key else None, chosen)
    if secret is not None and not _KEY.fullmatch(secret.value):
        raise TrivetError(f"the key from {secret.source} is not an API key: it has characters that no key has")
    if address is None:
        return _of_data_folder(settings, secret)
    if not _is_address(address.value):
        shown = re.sub("//.*@", "//…@", address.value)
        raise TrivetError(
            f"{_name_source('url', address)}={shown!r} is not the address of a service; one looks like "
            "http://127.0.0.1:8437, https://host or unix:///folder/api.sock"
        )
    ca_cert = settings.ca_cert if _same_side(chosen.get("ca_cert"), address) else None
    if secret is None:
        return _known_here(settings, address, ca_cert)
    _check_meant(secret, address, _url_beside(secret, settings, chosen))
    advice = None if key else f"the key is that of {_name_source('key', secret)}"
    return Endpoint(address.value, secret.value, ca_cert, advice)


def _is_address(url: str) -> bool:
    """Return whether a URL leads to a service: a request may have it, and its host can be looked up."""
    try:
        parts = urlsplit(url)
        httpx2.URL(url).raw_host.decode().encode("idna")
    except (ValueError, httpx2.InvalidURL):
        return False
    is_plain = "@" not in parts.netloc and not parts.query and not parts.fragment
    return is_plain and parts.scheme in ("http", "https", "unix")


def same_service(one: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port; all names of the loopback count as one host."""
    return _origin(one) == _origin(other)


def _check_meant(secret: _ChosenSetting, address: _ChosenSetting, beside: str | None) -> None:
    """Refuse to send a key to an address from elsewhere, unless the key's own source names the same address."""
    if beside is not None and same_service(beside, address.value):
        return
    if secret.found != address.found or (beside is not None and secret.source != address.source):
        meant = f", which is for {beside}" if beside is not None else ""
        raise MisdirectedKey(
            f"the key from {_name_source('key', secret)}{meant} was not sent to {address.value}, the address from "
            f"{_name_source('url', address)}: set {ENV_PREFIX}URL and {ENV_PREFIX}KEY together"
        )


def _url_beside(secret: _ChosenSetting, settings: Settings, chosen: dict[str, str]) -> str | None:
    """Return the URL that the key's own source gives, if any, whether or not another source overrides it."""
    if secret.source == "argument":
        return None
    if chosen.get("url") == secret.source:
        return settings.url
    return None if secret.source == "environment" else in_file().get("url")


def _of_data_folder(settings: Settings, secret: _ChosenSetting | None) -> Endpoint:
    """Return the service whose data is here. Its own key, or another key of the user, goes only to its socket."""
    data = settings.layout
    url = f"unix://{data.api_socket}"
    admin_key = _admin_key(settings)
    if secret is None and admin_key is None:
        here = "run it from the folder of `trivet up`, or set TRIVET_DATA, or TRIVET_URL and TRIVET_KEY"
        return Endpoint(url, None, advice=f"no key in {settings.admin_key_path}; {here}")
    if secret is not None and secret.found:
        raise MisdirectedKey(
            f"{secret.source} has a key and no url; the key was not sent anywhere: add the url of its service there"
        )
    try:
        if data.root.is_dir():
            check_owned(data.root, or_for_root=secret is None)
    except NotPrivateError as error:
        raise MisdirectedKey(f"the key was not sent: {error}") from None
    named = f"that of {_name_source('key', secret)}" if secret else f"that in {settings.admin_key_path}"
    return Endpoint(url, secret.value if secret else admin_key, advice=f"the key is {named}")


def _known_here(settings: Settings, address: _ChosenSetting, ca_cert: Path | None) -> Endpoint:
    """Return the endpoint of an address without a key; if it is the data folder's own service, its socket."""
    recorded = read_private(settings.layout.api_address)
    if recorded is not None and same_service(recorded, address.value):
        return _of_data_folder(settings, None)
    there = f"; the key in {settings.admin_key_path} is for {recorded or 'the service of that folder'} only"
    missing = f"no key for {address.value}: set TRIVET_KEY{there if _admin_key(settings) else ''}"
    return Endpoint(address.value, None, ca_cert, missing)


def _admin_key(settings: Settings) -> str | None:
    return read_private(settings.admin_key_path) if settings.admin_key_path.parent.is_dir() else None


def _choice(name: str, argument: str | None, setting: str | None, chosen: dict[str, str]) -> _ChosenSetting | None:
    if argument:
        return _ChosenSetting(argument, "argument", found=False)
    if not setting:
        return None
    return _ChosenSetting(
        setting.rstrip("/") if name == "url" else setting, chosen[name], found=_lies_in_working_folder(chosen[name])
    )


def _lies_in_working_folder(source: str) -> bool:
    """Return whether this source is a file that happens to be in the working folder."""
    return source == "trivet.toml" and f"{ENV_PREFIX}CONFIG" not in os.environ


def _same_side(source: str | None, address: _ChosenSetting) -> bool:
    return source is not None and _lies_in_working_folder(source) == address.found


def _name_source(name: str, choice: _ChosenSetting) -> str:
    if choice.source == "environment":
        return f"{ENV_PREFIX}{name.upper()}"
    return f"the argument '{name}'" if choice.source == "argument" else f"{Path(choice.source).resolve()}"


def _origin(url: str) -> tuple[str, str, int | str | None]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "unix", "", parts.path
    host = "localhost" if parts.hostname in LOOPBACK else (parts.hostname or "")
    try:
        port = parts.port
    except ValueError:
        port = None
    return parts.scheme, host, port or {"http": 80, "https": 443}.get(parts.scheme)
