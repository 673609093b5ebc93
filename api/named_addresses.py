"""Refuses specs that name an address to which the service may send nothing, before their jobs are accepted.

What a name stands for may change until something is sent: then it is looked at again (:mod:`api.webhook_address`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Iterator, Mapping
from typing import Any

from api.webhook_address import ForbiddenTarget, vetted
from service.jobs.records import Problem
from service.jobs.settings import Settings

_LOOKED_UP = 16
"""URLs of one request that are looked at; the others are when something is sent."""
_ANSWER_S = 2.0
_EXPECTED = "https:// and a public address, or one that the operator allows (TRIVET_WEBHOOK_ALLOW)"


class NamedAddresses:
    """Looks at the URLs in specs, with the operator's settings."""

    def __init__(self, settings: Settings) -> None:
        self._allowed = [ipaddress.ip_network(each) for each in settings.webhook_networks]
        self._own = {"export.mlflow": settings.export_mlflow, "export.otlp": settings.export_otlp}

    async def problems(self, specs: Mapping[str, str]) -> list[Problem]:
        """Return why specs, given as JSON by their paths, name what nothing may be sent to. A name that nobody knows,
        or not in time, is no problem yet.
        """
        naming = {at: text for at, text in specs.items() if "://" in text}  # most name no address
        found = [(path, url) for at, text in naming.items() for path, url in self._urls(at, json.loads(text))]
        urls = list(dict.fromkeys(url for _, url in found))[:_LOOKED_UP]
        reasons = dict(zip(urls, await asyncio.gather(*map(self._reason, urls)), strict=True))
        return [Problem(path, reason, url, _EXPECTED) for path, url in found if (reason := reasons.get(url))]

    def _urls(self, at: str, spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the URLs of a spec that are not the operator's own, each with the path of its field."""
        for path in ("notify.webhook", *self._own):
            part, _, name = path.partition(".")
            url = (spec.get(part) or {}).get(name)
            if url is not None and url != self._own.get(path):
                yield ".".join(filter(None, (at, path))), url

    async def _reason(self, url: str) -> str | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await vetted(url, self._allowed)
        except ForbiddenTarget as error:
            return str(error)
        except OSError:  # a name that is not known, or a name server that takes long
            return None
        return None
