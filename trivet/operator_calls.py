"""Provides the client's calls for operators: hosts and alerts, and what is in resources of its own.

Resources are loaded when first used, which saves every other command a tenth of its start.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote

from service.jobs.records import Host
from trivet.connection import Connection

if TYPE_CHECKING:
    from service.jobs.monitoring.alerts import ShownAlert
    from trivet.resources import AccountsResource, AuditResource, KeysResource, ProjectsResource
    from trivet.webhooks import WebhooksResource


class OperatorCalls:
    """Calls of a :class:`trivet.Client` over its connection."""

    _connection: Connection

    def hosts(self) -> list[Host]:
        return [Host.model_validate(item) for item in self._connection.json("GET", "/v1/hosts")["items"]]

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

        answer = self._connection.json("GET", "/v1/alerts", params={"all": everything})
        return [ShownAlert.model_validate(item) for item in answer["items"]]

    @cached_property
    def keys(self) -> KeysResource:
        from trivet.resources import KeysResource  # noqa: PLC0415

        return KeysResource(self._connection)

    @cached_property
    def accounts(self) -> AccountsResource:
        from trivet.resources import AccountsResource  # noqa: PLC0415

        return AccountsResource(self._connection)

    @cached_property
    def audit(self) -> AuditResource:
        from trivet.resources import AuditResource  # noqa: PLC0415

        return AuditResource(self._connection)

    @cached_property
    def projects(self) -> ProjectsResource:
        from trivet.resources import ProjectsResource  # noqa: PLC0415

        return ProjectsResource(self._connection)

    @cached_property
    def webhooks(self) -> WebhooksResource:
        from trivet.webhooks import WebhooksResource  # noqa: PLC0415

        return WebhooksResource(self._connection)
