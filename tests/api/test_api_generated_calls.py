"""Calls that schemathesis makes of the OpenAPI document, to every route of a real server. Wrong ones are in
test_api_contract and test_api_odd_input: to make such of a spec's schema takes it minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from api_world import Keys, Server, bearer
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

CALLS = 8
"""Of each route."""
ENDLESS = "/v1/events"
"""A stream over all jobs does not end."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_call_breaks_the_service(server: Server, keys: Keys) -> None:
    """A refusal is an answer; one of 500 and more is none. By a key that submits."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    headers = bearer(keys["submit"])
    called = 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        if operation.path == ENDLESS:
            continue

        @settings(max_examples=CALLS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            case.call_and_validate(headers=headers, checks=[not_a_server_error], timeout=60)

        call()
        called += 1
    assert called > 40
