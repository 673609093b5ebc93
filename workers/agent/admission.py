"""Checks, before an agent works, that it can: the broker admits it, its name is free, and others reach its address."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from service.jobs.host import ENV_PREFIX
from service.jobs.records import NotFound
from service.jobs.settings import LOOPBACK, Settings
from service.jobs.store import BrokerRefused, Store, StoreUnavailable
from service.torch_internals.installed import InstalledTorch, faults
from workers.supervisor.attempt_folder import interface_of

_BROKERS_PORT = 6379
_PAUSE_S = 1.0

logger = logging.getLogger(__name__)


class CannotWork(Exception):  # noqa: N818
    """The settings give this worker a name or an address that it cannot have; the message says what to change."""


def address_of(settings: Settings, broker_url: str) -> str:
    """Return the address at which other hosts reach this one: the operator's choice, else the one from which
    this host reaches the broker. Waits until the broker's name is known. Raises :class:`CannotWork` for an address
    that this host does not have, or that no other host could reach although the broker is on another.
    """
    towards_broker = _address_towards(broker_url)
    chosen = settings.worker_address or towards_broker
    try:
        interface_of(chosen)
    except ValueError as error:
        raise CannotWork(f"{error}; leave {ENV_PREFIX}WORKER_ADDRESS out for {towards_broker}") from None
    if _is_loopback(chosen) and not _is_loopback(towards_broker):
        raise CannotWork(
            f"{ENV_PREFIX}WORKER_ADDRESS={chosen} is reached only from this host, and the broker is on "
            f"another: no gang could have ranks here and elsewhere. Leave it out for {towards_broker}, or name "
            f"another address of this host"
        )
    return chosen


def usable_devices(torch: InstalledTorch, listed: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Return which of the host's ``visible`` GPUs its torch can use: none, if it is built for the CPU. The driver has
    ``listed`` them all. Warns of what is wrong with this torch, and raises :class:`CannotWork` for one that is too old.
    """
    for fault in faults(torch, len(listed)):
        if not fault.works:
            raise CannotWork(str(fault))
        logger.warning("%s", fault)
    return () if torch.cuda is None else tuple(visible)


def check_admitted(store: Store, settings: Settings, address: str, beat_s: float) -> None:
    """Raise :class:`BrokerRefused` if the broker rejects this host's user. Raise :class:`CannotWork` if no gang
    could have ranks here and on another host, or if another worker reports by this one's name: the host's
    record is then newer after two heartbeats. Waits for a broker that does not answer. Raises :class:`OSError` for an
    object store that cannot be used.
    """
    if (objects := store.artifacts.objects) is not None:
        objects.try_out()
    try:
        for host in store.hosts.list():
            if host.alive and host.name != settings.worker_name and _is_loopback(host.address) != _is_loopback(address):
                raise CannotWork(_unreachable(host.name, host.address, settings.worker_name, address))
        before = _last_seen(store, settings.worker_name)
        if before is None:
            return
        time.sleep(2 * beat_s)
        now = _last_seen(store, settings.worker_name)
    except BrokerRefused:
        raise
    except StoreUnavailable as error:
        logger.warning("waiting for the broker: %s", error)
        return
    if now is not None and now != before:
        raise CannotWork(
            f"another worker reports itself as {settings.worker_name!r}: give one of the two another name, with "
            f"{ENV_PREFIX}WORKER_NAME"
        )


def sign_off(store: Store, host: str) -> None:
    """Let nothing more be placed on a host, which may be unknown already; without a broker, its silence tells."""
    try:
        with contextlib.suppress(NotFound):
            store.hosts.leave(host)
    except StoreUnavailable as error:
        logger.warning("could not sign this host off: %s", error)


def _unreachable(other: str, its_address: str, name: str, address: str) -> str:
    at_loopback = other if _is_loopback(its_address) else name
    return (
        f"host {other} is at {its_address} and host {name} at {address}, so no gang could have ranks on both: start "
        f"the worker of {at_loopback} with {ENV_PREFIX}WORKER_ADDRESS set to an address that others reach"
    )


def _last_seen(store: Store, name: str) -> object:
    """Return when the host last reported; ``None`` for an unknown one."""
    return next((host.seen_at for host in store.hosts.list() if host.alive and host.name == name), None)


def _address_towards(broker_url: str) -> str:
    """Return this host's address on the way to the broker; nothing is sent there. Waits until the broker's name
    is known, since the broker may start later.
    """
    parts = urlsplit(broker_url)
    if parts.scheme == "unix" or parts.hostname is None:
        return "127.0.0.1"
    warned = False
    while True:
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or _BROKERS_PORT, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as towards:
                towards.connect(address)
                return str(towards.getsockname()[0])
        except OSError as error:
            if not warned:
                logger.warning("waiting for the broker %s: %s", parts.hostname, error.strerror or error)
                warned = True
            time.sleep(_PAUSE_S)


def _is_loopback(address: str) -> bool:
    return address in LOOPBACK or address.startswith("127.")
