"""Service accounts from the command line."""

from __future__ import annotations

import pytest
from cli_world import Cli

from service.jobs.store import Store


@pytest.mark.slow
def test_an_account_from_its_first_key_to_its_end(trivet: Cli, store: Store) -> None:
    store.projects.create("vision")
    trivet.ok("accounts", "create", "ci", "--role", "submitter", "--project", "vision")
    secret = trivet.ok("accounts", "key", "ci", "--expires", "90d").out.strip()
    key = store.keys.verify(secret)
    assert key is not None
    assert (key.name, key.project) == ("ci", "vision")
    assert key.id in trivet.ok("accounts", "list").out
    trivet.ok("accounts", "disable", "ci")
    assert store.keys.verify(secret) is None
    assert "disabled" in trivet.ok("accounts", "list").out
    trivet.ok("accounts", "enable", "ci")
    assert store.keys.verify(secret) is not None
    trivet.ok("accounts", "delete", "ci")
    assert store.keys.verify(secret) is None
    refused = trivet("accounts", "create", "ci", "--role", "owner")
    assert (refused.code, "--role owner" in refused.err) == (2, True)
