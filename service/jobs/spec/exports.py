"""Says where a job is told of when it ends: services that people use beside this one."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from service.jobs.spec.strict import Strict, disagreement

_LONGEST_URL = 2000
_EXPECTED = "an https:// URL with a host, and without user, password, query and fragment"


class ExportTargets(Strict):
    """Where parameters, metrics, artifacts and verdicts of a job go when it ends, beside its own page."""

    mlflow: str | None = Field(
        None, max_length=_LONGEST_URL, description="URL of an MLflow tracking server, which gets a run"
    )
    tensorboard: bool | None = Field(
        None, description="event files for TensorBoard, in the folder `tensorboard` of the service's data"
    )
    otlp: str | None = Field(
        None,
        max_length=_LONGEST_URL,
        description="URL of an OpenTelemetry collector, which gets metrics and a log record by OTLP over HTTP",
    )

    @model_validator(mode="after")
    def _urls_lead_to_servers(self) -> Self:
        for name in ("mlflow", "otlp"):
            url = getattr(self, name)
            if url is not None and not leads_to_a_server(url):
                raise disagreement(name, "not a URL that a job can be exported to", url, _EXPECTED)
        return self

    def chosen(self) -> tuple[str, ...]:
        """Return the names of the targets that are asked for."""
        return tuple(name for name in ExportTargets.model_fields if getattr(self, name))

    def with_defaults(self, defaults: ExportTargets) -> Self:
        """Return these targets, with those of ``defaults`` for the ones that are not mentioned."""
        missing = {name: value for name, value in defaults if value is not None and getattr(self, name) is None}
        return self.model_copy(update=missing)


def leads_to_a_server(url: str) -> bool:
    """Return whether a URL is one of a server, with nothing secret in it: specs are shown to whoever may read a job."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        return False
    said_more = (parts.username, parts.password, parts.query or None, parts.fragment or None)
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return is_plain and parts.scheme in ("https", "http") and bool(parts.hostname) and has_port and not any(said_more)
