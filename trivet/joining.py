"""Joins this host to a fleet by an invitation: tries its settings, and keeps them for the worker."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.jobs.files import atomic_write
from service.jobs.host import ENV_PREFIX, close_to_others
from service.jobs.settings import Invitation, Settings
from service.jobs.store import BrokerRefused, Store, StoreUnavailable
from trivet.errors import TrivetError


class CannotJoin(TrivetError):  # noqa: N818
    """This host cannot join; the message says what to change."""


def join(invitation: Invitation) -> dict[str, str]:
    """Return the variables for a worker of the inviting fleet; password and certificate are in this user's
    files. Raises :class:`CannotJoin`.
    """
    variables = _keep_settings(invitation, _folder(invitation))
    given: dict[str, Any] = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in variables.items()}
    settings = Settings(**given)
    store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    with closing(store):
        try:
            hosts = store.hosts.list()
        except BrokerRefused as error:
            raise CannotJoin(f"{error}; ask for a new invitation (trivet broker invite)") from None
        except StoreUnavailable as error:
            at = urlsplit(invitation.url).netloc
            raise CannotJoin(f"the broker at {at} does not answer: {error}; open its port to this host") from None
    if settings.store is not None:  # hosts share no folder; the worker tries the object store when it starts
        return variables
    missing = [host.name for host in hosts if host.alive and not settings.layout.host(host.name).is_dir()]
    if missing:
        raise CannotJoin(
            f"{settings.layout.root} is not the data folder of this fleet: it has nothing of host {missing[0]}. Mount "
            f"the folder that its hosts share, and name it in {ENV_PREFIX}DATA; where they share none, set "
            f"{ENV_PREFIX}STORE"
        )
    return variables


def _folder(invitation: Invitation) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "trivet", invitation.user)


def _keep_settings(invitation: Invitation, folder: Path) -> dict[str, str]:
    close_to_others(folder)
    atomic_write(folder / "password", invitation.password.encode())
    variables = {
        "REDIS_URL": invitation.url,
        "BROKER_USER": invitation.user,
        "BROKER_PASSWORD_FILE": str(folder / "password"),
    }
    if invitation.ca_cert is not None:
        atomic_write(folder / "ca.pem", invitation.ca_cert.encode())
        variables["BROKER_CA_CERT"] = str(folder / "ca.pem")
    name = invitation.user.removeprefix("host").removeprefix("-")
    if name and f"{ENV_PREFIX}WORKER_NAME" not in os.environ:
        variables["WORKER_NAME"] = name
    return {f"{ENV_PREFIX}{each}": value for each, value in variables.items()}
