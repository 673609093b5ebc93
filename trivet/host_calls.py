"""The client's calls about hosts, and about what is wrong with the service."""

from __future__ import annotations

from urllib.parse import quote

from service.jobs.monitoring.shown import ShownAlert
from service.jobs.records import Host
from trivet.connection import Connection


class HostCalls:
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
        """Return what is wrong with the service, those alerts that fire first; with ``everything`` all alerts. Needs an
        admin key.
        """
        answer = self._connection.json("GET", "/v1/alerts", params={"all": everything})
        return [ShownAlert.model_validate(item) for item in answer["items"]]
