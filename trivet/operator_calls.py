"""Provides the client's calls for operators: hosts and alerts, and what is in resources of its own.

Resources are loaded when first used, which saves every other command a tenth of its start.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from service.jobs.records import Host
from trivet.connection import Connection

if TYPE_CHECKING:
    from service.jobs.monitoring.alerts import ShownAlert
    from trivet.resources import AccountsResource, AuditResource, KeysResource, ProjectsResource
    from trivet.webhooks import WebhooksResource


def _resource(module: str, name: str) -> Any:
    """Return the property of a resource, whose module is loaded with its first use."""
    return cached_property(lambda calls: getattr(import_module(f"trivet.{module}"), name)(calls._connection))


class OperatorCalls:
    """Calls of a :class:`trivet.Client` over its connection."""

    _connection: Connection

    def hosts(self) -> list[Host]:
        return self._connection.listed(Host, "/v1/hosts")

    def drain(self, host: str) -> Host:
        return self._host(host, "drain")

    def resume(self, host: str) -> Host:
        return self._host(host, "resume")

    def _host(self, host: str, change: str) -> Host:
        path = f"/v1/hosts/{quote(host, safe='')}/{change}"
        return Host.model_validate(self._connection.json("POST", path, bears_repetition=True))

    def alerts(self, *, everything: bool = False) -> list[ShownAlert]:
        """Return the service's alerts, firing ones first; with ``everything``, all alerts. Needs an admin key."""
        from service.jobs.monitoring.alerts import ShownAlert  # noqa: PLC0415 - brings every condition

        return self._connection.listed(ShownAlert, "/v1/alerts", params={"all": everything})

    keys: cached_property[KeysResource] = _resource("resources", "KeysResource")
    accounts: cached_property[AccountsResource] = _resource("resources", "AccountsResource")
    audit: cached_property[AuditResource] = _resource("resources", "AuditResource")
    projects: cached_property[ProjectsResource] = _resource("resources", "ProjectsResource")
    webhooks: cached_property[WebhooksResource] = _resource("webhooks", "WebhooksResource")
