"""What a client stores does not come back to everyone who looks: lists leave specs out, refusals are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as redis_py
from lanes import first_fast
from pydantic import SecretStr
from serving import Service, serving

from api.requests.problems import MOST_ERRORS
from service.jobs.settings import Settings

MLP = {"family": "mlp", "in_features": 1000, "hidden": [4], "out_features": 1}


@pytest.fixture(scope="module")
def running(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(Settings(data=tmp_path_factory.mktemp("answers"), redis_url=SecretStr(broker))) as service:
        yield service


@pytest.fixture
def service(running: Service, redis: redis_py.Redis) -> Service:
    """A service whose database is empty."""
    return running


@pytest.mark.slow
def test_a_list_of_jobs_with_large_specs_is_small(service: Service) -> None:
    """Sixty specs of 800 kB were once an answer of 47 MiB."""
    box = {"lower": [0.123456789] * 1000, "upper": [1.0] * 1000, "output": [{"coefficients": [1.0 / 3] * 40_000}]}
    spec = {"kind": "verify", "model": {**MLP, "out_features": 40_000}, "property": {"box": box}}
    with service.client("ada") as client:
        answers = [client.post("/v1/jobs", json=spec) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {201}
        assert len(answers[0].content) > 700_000
        page = client.get("/v1/jobs")
        assert len(page.json()["items"]) == 8
        assert len(page.content) < 8 * 1000
        assert all(item["spec"] is None and item["parallel"]["tp"] == 1 for item in page.json()["items"])
        whole = client.get("/v1/jobs", params={"include": "spec"}).json()
        assert len(whole["items"]) < 8
        assert whole["items"][0]["spec"]["property"]["box"]["lower"] == box["lower"]
        assert whole["next_cursor"] == whole["items"][-1]["id"]


TRAIN = {"kind": "train", "model": {"family": "mlp", "in_features": 64, "out_features": 10}, "steps": 1}
DIGITS = {"source": "digits"}
WRONG = {
    "entries of a list": ({**TRAIN, "data": DIGITS, "model": {**TRAIN["model"], "hidden": [0] * 300_000}}, "model.hidden.0"),  # type: ignore[dict-item]  # noqa: E501
    "objects of a list": ({"kind": "verify", "model": MLP, "property": {"box": {"lower": [0], "upper": [1], "output": [{}] * 200_000}}}, "property.box.output.0.coefficients"),  # noqa: E501
    "values of an object": ({**TRAIN, "data": DIGITS, "labels": {f"{each:x}": 1 for each in range(80_000)}}, ""),
    "unknown fields": ({**TRAIN, "data": DIGITS, **{f"a{each}": 1 for each in range(1000)}}, "a0"),
    "halfspaces that do not fit": ({"kind": "verify", "model": MLP, "property": {"box": {"lower": [0] * 1000, "upper": [1] * 1000, "output": [{"coefficients": [1, 2]}] * 20_000}}}, "property.box.output.0.coefficients"),  # noqa: E501
    "one long value": ({**TRAIN, "data": DIGITS, "name": "x" * 900_000}, "name"),
    "one long name": ({**TRAIN, "data": DIGITS, "x" * 900_000: 1}, "x" * 1000 + "…"),
}  # fmt: skip


@pytest.mark.parametrize("case", first_fast(1, WRONG))
def test_a_body_in_which_everything_is_wrong_is_refused_in_short(service: Service, case: str) -> None:
    """One such body of a megabyte was once answered by 70 MB, after half a minute in which nobody else was served."""
    spec, path = WRONG[case]
    with service.client("ada") as client:
        answer = client.post("/v1/jobs", json=spec)
    assert answer.status_code == 422
    assert len(answer.content) < 64_000
    errors = answer.json()["errors"]
    assert errors[0]["path"] == path
    assert len(errors) <= MOST_ERRORS + 1
    if len(errors) > MOST_ERRORS:
        assert errors[-1]["message"] == f"more fields are wrong than the {MOST_ERRORS} named here"


@pytest.mark.slow
def test_a_plan_of_a_long_schedule_is_made_in_a_process_of_its_own(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking and planning here, in the API's own process, would fail."""
    monkeypatch.setattr("service.jobs.submission.request.check", None)
    monkeypatch.setattr("service.jobs.submission.request.plan", None)
    spec = {
        **TRAIN,
        "model": {**TRAIN["model"], "hidden": [8] * 64},  # type: ignore[dict-item]
        "data": DIGITS,
        "parallel": {"pp": 4},
        "pipeline": {"micro_batches": 64},
        "batch": {"global": 64},
    }
    with service.client("ada") as client:
        job = client.post("/v1/jobs", json=spec).json()["id"]
        plan = client.get(f"/v1/jobs/{job}/schedule").json()
    assert sum(len(row["cells"]) for row in plan["rows"]) == 2 * 4 * 64
