"""Defines who is told of a job: receivers of notices, and services to which it is exported."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, StringConstraints, model_validator

from service.jobs.spec.common.states import JobState
from service.jobs.spec.common.strict import Strict, disagreement

WebhookFormat = Literal["standard", "slack", "email"]
"""The forms of a delivery: a signed POST by Standard Webhooks, a text for Slack and its like, an e-mail."""
_ADDRESS = re.compile(r"mailto:[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9][A-Za-z0-9.-]{0,252}")
_RELATIONS = MappingProxyType({">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt})
_THRESHOLD = re.compile(rf"\s*({'|'.join(_RELATIONS)})\s*(\S+)\s*")
_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Threshold = Annotated[str, StringConstraints(max_length=60)]


@dataclass(frozen=True)
class Threshold:
    """A relation to a number, such as ``>= 0.9``."""

    relation: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Parse a text. Raises ``ValueError`` if it is no threshold."""
        found = _THRESHOLD.fullmatch(text)
        if found is None or not math.isfinite(limit := float(found[2])):
            raise ValueError(f"no threshold: {text}")
        return cls(found[1], limit)

    def holds(self, value: float) -> bool:
        """Return whether a number is beyond the threshold; one that is not a number never is."""
        return bool(_RELATIONS[self.relation](value, self.limit))


def _ends() -> list[JobState]:
    return ["succeeded", "failed", "cancelled"]


class NotifySpec(Strict):
    """Tells a URL of the job by a signed POST: of its states, and once of each number that reaches a threshold.

    Of a sweep, ``on`` is about the sweep as a whole, and ``when`` about each of its jobs.
    """

    webhook: str = Field(
        max_length=2000,
        description="https:// URL that takes a POST, or mailto:ADDRESS; those who may read the job see it",
        examples=["https://ci.example.org/trivet"],
    )
    format: WebhookFormat = Field(
        "standard",
        exclude_if=lambda name: name == "standard",  # a worker of an older version does not know the field
        description="form of the requests: `standard` is signed, `slack` has a text for chats; `email` is for mailto:",
    )
    on: list[JobState] = Field(
        default_factory=_ends,
        max_length=7,
        description="states to report; when absent, the states that end the job",
        examples=[["failed"]],
    )
    when: dict[_Name, _Threshold] = Field(
        default_factory=dict,
        max_length=16,
        description="thresholds by the name of a metric, or of a number of the result: one of `>=`, `<=`, `>`, `<` "
        "and a number; the first value that meets it is reported",
        examples=[{"eval_accuracy": ">= 0.9"}],
    )

    @model_validator(mode="after")
    def _can_be_told(self) -> NotifySpec:
        try:
            check_receiver(self.webhook, self.format)
        except ValueError as error:
            message = "not a URL that webhooks may go to"
            raise disagreement("webhook", message, self.webhook, str(error)) from None
        if not self.on and not self.when:
            raise disagreement("on", "there is nothing to report", self.on, "a state, or a threshold in when")
        return self

    @model_validator(mode="after")
    def _thresholds_are_some(self) -> NotifySpec:
        for name, text in self.when.items():
            try:
                Threshold.parse(text)
            except ValueError:
                expected = "`>=`, `<=`, `>` or `<` and a number, such as '>= 0.9'"
                raise disagreement(f"when.{name}", "not a threshold", text, expected) from None
        return self

    def reached(self, numbers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield the given names and values that are beyond their thresholds. Names with dots lead into nested
        objects.
        """
        for name, text in self.when.items():
            value = _number_at(numbers, name)
            if value is not None and Threshold.parse(text).holds(value):
                yield name, value


def _number_at(numbers: Mapping[str, Any], path: str) -> float | None:
    found: Any = numbers.get(path)
    if found is None:
        found = numbers
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
    return None if isinstance(found, bool) or not isinstance(found, (int, float)) else float(found)


def check_receiver(url: str, form: WebhookFormat) -> None:
    """Check where deliveries of a form go, as far as possible without resolving it. Raises ``ValueError`` that says
    what is accepted.
    """
    if form != "email":
        return check_url(url)
    if _ADDRESS.fullmatch(url) is None:
        raise ValueError("one address, such as mailto:ada@example.org, for the format email")
    return None


def check_url(url: str) -> None:
    """Check a URL as far as possible without resolving it. Raises ``ValueError`` that says what is accepted."""
    if (parts := _server_of(url)) is None:
        raise ValueError("an https:// URL with a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL without user and password: deliveries are signed")
    if parts.fragment:
        raise ValueError("a URL without a fragment")


def check_sendable(url: str) -> None:
    """Check that a request can have a URL: specs are read without this, since earlier versions took any. Raises
    ``ValueError`` that says what is accepted.
    """
    host = urlsplit(url).hostname or ""
    labels = host.removesuffix(".").split(".")
    has_name = len(host) <= _LONGEST_HOST and all(0 < len(each) <= _LONGEST_LABEL for each in labels)  # RFC 1035
    if has_name and host.isascii() and _CONTROL.search(url.strip()) is None:
        return
    here = ""
    with contextlib.suppress(ValueError):  # no host that has such a form
        name = host.encode("idna").decode()
        if not host.isascii() and name.encode().decode("idna") == host:  # the codec makes ß another letter
            here = f" (here {name})"
    lengths = f"with 1 to {_LONGEST_LABEL} characters between its dots"
    raise ValueError(f"an https:// URL with a host in ASCII{here}, {lengths}, and without control characters")


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST_URL, _LONGEST_HOST, _LONGEST_LABEL = 2000, 253, 63
OFFLINE = "offline"
"""In place of a URL of Weights & Biases: runs are kept in files."""
_EXPECTED = "an https:// URL with a host, and without user, password, query and fragment"


class ExportTargets(Strict):
    """The services that get metrics of a job while it runs, and its parameters, artifacts and verdicts when it ends."""

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
    wandb: str | None = Field(
        None,
        max_length=_LONGEST_URL,
        exclude_if=lambda url: url is None,  # a worker of an older version does not know the field
        description="URL of a Weights & Biases server, such as https://api.wandb.ai, which gets a run; or `offline`: "
        "a run in the folder `wandb` of the service's data",
    )

    @model_validator(mode="after")
    def _urls_lead_to_servers(self) -> Self:
        for name in ("mlflow", "otlp", "wandb"):
            url = getattr(self, name)
            if url is not None and not leads_to_a_server(url) and (name, url) != ("wandb", OFFLINE):
                expected = f"{_EXPECTED}, or `{OFFLINE}`" if name == "wandb" else _EXPECTED
                raise disagreement(name, "not a URL that a job can be exported to", url, expected)
        return self

    def chosen(self) -> tuple[str, ...]:
        """Return the names of the requested targets."""
        return tuple(name for name in ExportTargets.model_fields if getattr(self, name))

    def with_defaults(self, defaults: ExportTargets) -> Self:
        """Return these targets, with those of ``defaults`` for the missing ones."""
        missing = {name: value for name, value in defaults if value is not None and getattr(self, name) is None}
        return self.model_copy(update=missing)


def leads_to_a_server(url: str) -> bool:
    """Return whether a URL names a server and contains no secret: specs are shown to whoever may read a job."""
    if (parts := _server_of(url)) is None:
        return False
    says_more = any((parts.username, parts.password, parts.query, parts.fragment))
    return url.isascii() and url.isprintable() and " " not in url and not says_more


def _server_of(url: str) -> SplitResult | None:
    """Return the parts of a URL that leads to a host by HTTP; ``None`` for any other."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        return None
    return parts if parts.scheme in ("https", "http") and parts.hostname and has_port else None
