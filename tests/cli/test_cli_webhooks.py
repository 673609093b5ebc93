"""``trivet webhooks``: made, listed, looked into, deleted."""

from __future__ import annotations

from cli_world import Cli
from waiting import eventually


def test_webhooks_are_created_listed_and_deleted(trivet: Cli) -> None:
    assert "no webhooks" in trivet.ok("webhooks", "list").out
    words = ("webhooks", "create", "https://ci.example.org/hook", "--on", "failed", "--kind", "train", "--json")
    made = trivet.ok(*words).json
    assert made["secret"].startswith("whsec_")
    assert (made["states"], made["kinds"], made["project"]) == (["failed"], ["train"], None)
    listed = trivet.ok("webhooks", "list")
    assert all(text in listed.out for text in (made["id"], "https://ci.example.org/hook", "works"))
    assert made["secret"] not in listed.out
    assert "no deliveries" in trivet.ok("webhooks", "deliveries", made["id"]).out
    trivet.ok("webhooks", "delete", made["id"])
    gone = trivet("webhooks", "delete", made["id"])
    assert (gone.code, f"there is no webhook {made['id']}" in gone.err) == (2, True)


def test_a_url_that_cannot_be_meant_is_refused(trivet: Cli) -> None:
    refused = trivet("webhooks", "create", "ftp://example.org")
    assert refused.code == 2
    assert "https:// URL" in refused.err


def test_what_a_job_has_told_is_shown_with_it(trivet: Cli) -> None:
    asked = ("submit", trivet.spec(), "--set", "notify={webhook: URL, on: [cancelled]}")
    refused = trivet(*(word.replace("URL", "http://127.0.0.1:9/") for word in asked))
    assert (refused.code, "neither a public address" in " ".join(refused.err.split())) == (2, True)
    job = trivet.ok(*(word.replace("URL", "https://nobody.invalid/") for word in asked)).out.strip()
    trivet.ok("cancel", job)
    shown = eventually(lambda: "not taken" in (text := trivet.ok("show", job).out) and text)
    assert "cancelled" in shown
    first = trivet.ok("webhooks", "secret").out.strip()
    assert first.startswith("whsec_")
    assert trivet.ok("webhooks", "secret", "--renew", "--json").json["secret"] != first
