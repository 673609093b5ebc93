"""Reading, exporting and verifying the audit log from the command line."""

from __future__ import annotations

import json

import pytest
from cli_world import Cli


def test_the_log_is_listed_exported_and_verified(trivet: Cli) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.split()[0]
    trivet.ok("cancel", job_id)
    listed = trivet.ok("audit", "--job", job_id, "--since", "1d").out
    assert listed.index("job.cancel") < listed.index("job.submit")
    assert "admin" in listed
    (newest,) = trivet.ok("audit", "--json", "-n", "1").json["items"]
    assert (newest["action"], newest["job"]) == ("job.cancel", job_id)

    exported = trivet.ok("audit", "export").out
    assert [json.loads(line)["action"] for line in exported.splitlines()] == ["job.submit", "job.cancel"]
    head = trivet.ok("audit", "verify").out.split()[-1]
    assert head == f"{newest['number']}:{newest['hash']}"

    file = trivet.folder / "audit.jsonl"
    file.write_text(exported)
    assert trivet.ok("audit", "verify", str(file), "--head", head, "--json").json["entries"] == 2
    file.write_text(exported.replace('"actor":"admin"', '"actor":"other"', 1))
    edited = trivet("audit", "verify", str(file))
    assert (edited.code, "was changed" in edited.err) == (1, True)
    file.write_text(exported.splitlines(keepends=True)[0])
    shorter = trivet("audit", "verify", str(file), "--head", head)
    assert (shorter.code, "is missing" in shorter.err) == (1, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--since", "yesterday"], "neither a length of time"),
        (["--since", "99999999999999d"], "is too long to count"),
        (["--action", "job.burn"], "job.burn"),
        (["verify", "--head", "7"], "is not a number, a colon"),
        (["verify", "none.jsonl"], "none.jsonl"),
    ],
)
def test_odd_words_are_refused(trivet: Cli, words: list[str], told: str) -> None:
    ran = trivet("audit", *words)
    assert ran.code == 2
    assert told in ran.err
