"""A receiver, a job and its notices, for the tests of webhooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from digits import digits_job
from waiting import eventually
from webhook_receiver import Receiver, receiving

SPEC = digits_job(name="mine")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def notices(client: httpx2.Client, job: str, wanted: int) -> list[dict[str, Any]]:
    """The notices of a job, oldest first, once there are so many and each is over."""

    def over() -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = client.get(f"/v1/jobs/{job}/notices").json()["items"]
        return found if len(found) == wanted and all(each["state"] != "pending" for each in found) else None

    return sorted(eventually(over), key=lambda each: str(each["event"]["timestamp"]))
