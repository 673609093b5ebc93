"""Drafts: a text is checked as a submission would be, with the lines of what is wrong, and nothing is submitted."""

from __future__ import annotations

from typing import Any

import pytest
from api_world import TRAIN, Keys, bearer
from fastapi.testclient import TestClient

SPEC = """\
kind: train  # a comment
model: {family: mlp, in_features: 64, hidden: [16], out_features: 10}
data:
  source: digits
steps: 10
"""


def check(client: TestClient, text: str) -> dict[str, Any]:
    answer = client.post("/v1/jobs:check", json={"text": text})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_a_draft_would_submit_is_told_and_submits(client: TestClient) -> None:
    told = check(client, SPEC)
    assert (told["spec"], told["errors"], told["jobs"], told["ranks"], told["plan"]) == (TRAIN, [], 1, 1, None)
    assert client.get("/v1/jobs").json()["items"] == []
    answer = client.post("/v1/jobs", content=told["body"], headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["spec"]["steps"]) == (201, 10)


def test_integers_of_any_size_reach_the_submission_as_they_are(client: TestClient) -> None:
    told = check(client, f"{SPEC}seed: {2**63 - 1}\n")
    answer = client.post("/v1/jobs", content=told["body"], headers={"Content-Type": "application/json"})
    assert answer.json()["spec"]["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        (SPEC.replace("steps: 10", "stebs: 10"), "stebs", 5, "did you mean 'steps'"),
        (SPEC.replace("steps: 10\n", ""), "steps", 1, "this field is required"),
        (SPEC.replace("digits", "digit"), "data.source", 4, "is not known"),
        (SPEC.replace("64", "63"), "model.in_features", 2, "features"),
        (SPEC + "after: [job_00000000000000000000]\n", "after.0", 6, "job_00000000000000000000"),
        (SPEC + "sweep: {grid: {stebs: [1]}}\n", "sweep.grid.stebs", 6, "stebs"),
        ("kind: [train", "", 1, "expected ',' or ']'"),
        ("kind: train\n\tsteps: 1\n", "", 2, "indent YAML with spaces"),
        ("", "", None, "object"),
    ],
)
def test_an_error_points_at_its_line(client: TestClient, text: str, path: str, line: int | None, message: str) -> None:
    error = next(error for error in check(client, text)["errors"] if error["path"] == path)
    assert error["line"] == line
    assert message in error["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: .inf", "finite"),
        ("1: 2", "a field's name must be text"),
        ("a: " + "9" * 5000, "digits"),
        ('"\\ud800"', "surrogate"),
    ],
)
def test_what_json_does_not_have_is_refused(client: TestClient, text: str, message: str) -> None:
    told = check(client, text)
    assert (told["spec"], told["body"], len(told["errors"])) == (None, None, 1)
    assert message in told["errors"][0]["message"]


def test_few_lines_that_stand_for_gigabytes_harm_nobody(client: TestClient) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    huge = "a: &a [" + "x, " * 999 + "x]\nb: [" + ", ".join(["*a"] * 900) + "]\n"
    told = [check(client, text)["errors"][0]["message"] for text in (bomb, "a: &a [*a]\n", huge)]
    assert "alias" in told[0]
    assert "refers to a value around it" in told[1]
    assert "stands for more than" in told[2]
    assert check(client, "a: &a [1]\nb: *a\n")["spec"] == {"a": [1], "b": [1]}


def test_a_sweep_and_a_pipeline_are_told_before_they_are_submitted(client: TestClient) -> None:
    swept = check(client, SPEC + "sweep: {grid: {seed: [1, 2, 3]}}\n")
    assert (swept["jobs"], swept["errors"]) == (3, [])
    text = SPEC.replace("[16]", "[16, 16, 16]") + "parallel: {pp: 2}\npipeline: {micro_batches: 4}\n"
    piped = check(client, text)
    assert (piped["ranks"], piped["plan"]["ranks"], piped["plan"]["micro_batches"]) == (2, 2, 4)
    assert 0 < piped["plan"]["bubble"] < 1


def test_a_key_that_may_not_submit_may_not_check(client: TestClient, keys: Keys) -> None:
    client.headers.update(bearer(keys["read"]))
    assert client.post("/v1/jobs:check", json={"text": SPEC}).status_code == 403
