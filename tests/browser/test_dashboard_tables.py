"""Tables of jobs, as the browser works them out: columns, order, what differs, names."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

pytestmark = pytest.mark.browser


def test_the_same_question_is_told_from_others(run: Any) -> None:
    def asked(identity: str, method: str, eps: float = 0.1, **fields: Any) -> dict[str, Any]:
        spec = {"kind": "verify", "model": {"job": "m"}, "property": {"eps": eps}, "method": method}
        return job(identity, spec, state="succeeded", **fields)

    others = [asked("1", "crown"), asked("2", "ibp"), asked("3", "ibp"), asked("4", "crown-ibp", 0.2), asked("5", "x")]
    others[4]["state"] = "failed"
    assert [one["id"] for one in run("methods", "sameQuestion", others[0], others)] == ["1", "2"]


def test_gathered_margins_keep_the_worst_instance(run: Any) -> None:
    rows = [{"instance": index, "verdict": "verified", "margin": 1.0, "lower": [], "upper": []} for index in range(300)]
    rows[217] |= {"margin": -3.0, "verdict": "falsified"}
    columns = run("bounds", "gather", rows, 30)
    assert len(columns) <= 30
    assert min((column["least"] for column in columns), key=lambda row: row["margin"])["instance"] == 217


def test_by_margin_a_row_without_one_is_first_unless_it_is_verified(run: Any) -> None:
    rows = [("verified", 0.5), ("verified", None), ("falsified", None), ("unknown", -2.0)]
    given = [{"instance": at, "verdict": verdict, "margin": margin} for at, (verdict, margin) in enumerate(rows)]
    assert [row["instance"] for row in run("bounds", "ordered", given, "margin")] == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"state": "failed", "error": {"type": "ValueError", "message": "no"}}, "ValueError: no"),
        ({"state": "queued", "reason": "waits for devices"}, "waits for devices"),
        ({"state": "succeeded", "result": {"loss": 0.25}}, "loss 0.2500"),
        ({"state": "succeeded", "result": {"loss": 1, "eval_accuracy": 0.5}}, "accuracy 50.0 %"),
        ({"state": "succeeded", "result": {"verdicts": {"verified": 3, "unknown": 2}, "instances": 5}},
         "2 unknown"),
        ({"state": "succeeded", "result": {"gate": {"train": "inductor"}}}, "allows inductor (train)"),
        ({"state": "succeeded", "result": {"gate": {"train": "eager", "inference": "eager"}}}, "allows eager"),
        ({"state": "succeeded", "result": {"gate": {"train": None}}}, "allows no compilation"),
        ({"state": "succeeded", "result": None}, ""),
        ({"state": "running", "children": {"total": 9, "succeeded": 4, "failed": 1, "best": {"value": 0.5}}},
         "4 of 9 succeeded, 1 failed, best 0.5000"),
    ],
)  # fmt: skip
def test_the_headline_of_a_job(run: Any, job: dict[str, Any], told: str) -> None:
    assert run("headline", "headline", job).replace("\u202f", " ") == told


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"verdicts": {"verified": 0, "timeout": 1}, "instances": 1}, ("0 of 1 proved", "warn")),
        ({"verdicts": {"verified": 3, "falsified": 0}, "instances": 3}, ("3 of 3 proved", "good")),
        ({"verdicts": {"verified": 2, "falsified": 1}}, ("2 of 3 proved", "bad")),
        ({"gate": {"train": None}}, ("denied", "bad")),
        ({"gate": {"train": "inductor"}}, ("allowed", "good")),
        ({"eval_certified_accuracy": 0.03}, ("3 % certified", "plain")),
        ({"loss": 0.25}, None),
    ],
)
def test_the_answer_of_a_job_is_apart_from_its_state(run: Any, result: dict[str, Any], told: tuple[str, str]) -> None:
    found = run("headline", "answer", {"state": "succeeded", "result": result})
    assert (found and (found["words"].replace("\u202f", " "), found["tone"])) == told
    assert run("headline", "answer", {"state": "running", "result": result}) is None


def test_times_on_an_axis_are_those_of_a_clock(run: Any) -> None:
    assert run("scales", "timeTicks", -2000, 0, 10) == [-1800, -1500, -1200, -900, -600, -300, 0]
    words = [run("format", "span", seconds).replace("\u202f", " ") for seconds in (45, 90, 300, 3600, 5400, 86_400)]
    assert words == ["45 s", "1 min 30 s", "5 min", "1 h", "1 h 30 min", "1 d"]


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("", "/v1/jobs?sweep=none&order=active&limit=5"),
        (
            "q=a+b&state=failed&state=queued&x=1",
            "/v1/jobs?q=a+b&sweep=none&state=failed&state=queued&order=active&limit=5",
        ),
        ("sweep=all&order=newest&cursor=c", "/v1/jobs?order=newest&limit=5&cursor=c"),
    ],
)
def test_the_address_says_what_is_listed(run: Any, address: str, path: str) -> None:
    assert run("filters", "listPath", address, 5) == path


def test_states_are_chosen_one_by_one(run: Any) -> None:
    assert run("filters", "toggled", "q=a&cursor=c", "failed") == "q=a&state=failed"
    assert run("filters", "toggled", "state=failed", "queued") == "state=failed&state=queued"
    assert run("filters", "toggled", "state=failed&state=queued", "failed") == "state=queued"
    assert run("filters", "toggled", "state=failed&q=a", "") == "q=a"


def test_a_click_on_a_heading_sorts_then_turns_round_then_lets_go(run: Any) -> None:
    once = run("columns", "withSort", "q=a&cursor=c", "result.loss")
    assert once == "q=a&sort=-result.loss"
    twice = run("columns", "withSort", once, "result.loss")
    assert twice == "q=a&sort=result.loss"
    assert run("columns", "withSort", twice, "result.loss") == "q=a"
    assert run("columns", "withSort", once, "owner") == "q=a&sort=owner"
    assert run("columns", "sortOf", "sort=constructor") is None


def test_columns_are_added_before_what_tells_when_and_taken_away(run: Any) -> None:
    shown = run("columns", "columnsOf", "")
    added = run("columns", "withColumn", "", "result.loss")
    columns = run("columns", "columnsOf", added)
    assert sorted(columns) == sorted([*shown, "result.loss"])
    assert columns.index("result.loss") < columns.index("duration")
    assert run("columns", "withColumn", added, "result.loss") == ""
    assert run("columns", "columnsOf", "columns=owner,toString,owner") == ["owner"]


def job(identity: str, spec: dict[str, Any], result: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": identity, "kind": spec["kind"], "name": "", "spec": spec, "result": result, **fields}


def test_jobs_differ_in_fields_that_others_of_their_kind_have(run: Any) -> None:
    train = {"kind": "train", "name": "a", "steps": 10, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}
    jobs = [
        job("1", train, {"loss": 0.5, "layers": {"0": {"norm": {"l2": 3}}}, "shape": [1, 2]}),
        job(
            "2", {**train, "name": "b", "optimizer": {"lr": 0.2, "betas": [0.9, 0.99]}}, {"loss": None, "device": "cpu"}
        ),
        job("3", {"kind": "verify", "name": "c", "method": "crown"}),
    ]
    columns = run("compare", "compared", jobs)["columns"]
    assert columns == [
        {"path": "kind", "of": "spec", "numeric": False},
        {"path": "optimizer.lr", "of": "spec", "numeric": True},
        {"path": "optimizer.betas", "of": "spec", "numeric": False},
        {"path": "result.loss", "of": "result", "numeric": True},
        {"path": "result.device", "of": "result", "numeric": False},
    ]


def test_what_all_results_have_alike_is_no_column(run: Any) -> None:
    jobs = [
        job(
            name,
            {"kind": "train"},
            {"loss": loss, "steps": 40, "completed": {"done": 40, "total": 40, "unit": "steps"}},
        )
        for name, loss in (("1", 0.5), ("2", 0.4))
    ]
    found = run("compare", "compared", jobs)
    assert [column["path"] for column in found["columns"]] == ["result.loss"]
    found = run("compare", "compared", jobs[:1])
    assert [column["path"] for column in found["columns"]] == ["result.loss", "result.steps"]


def test_what_a_result_repeats_of_the_spec_is_one_column(run: Any) -> None:
    jobs = [
        job(method, {"kind": "verify", "method": method}, {"method": method, "rows": rows, "stopped": False})
        for method, rows in (("ibp", 1), ("crown", 2))
    ]
    found = run("compare", "compared", jobs)
    assert [column["path"] for column in found["columns"]] == ["method", "result.rows"]
    jobs[0]["result"]["method"] = "ibp, rigorous"
    found = run("compare", "compared", jobs)
    assert [column["path"] for column in found["columns"]] == ["method", "result.method", "result.rows"]


@pytest.mark.parametrize(
    ("value", "text"),
    [("c1" * 32, "c1c1c1…c1c1"), ("c1" * 8, "c1" * 8), (1234.5, "1,235"), (None, "–"), ([1], "[1]")],
)
def test_of_a_hash_both_ends_are_shown(run: Any, value: Any, text: str) -> None:
    assert run("compare", "shown", value) == text


def test_jobs_of_one_name_are_told_apart(run: Any) -> None:
    spec = {"kind": "train"}
    jobs = [
        job("job_00001", spec, name="same"),
        job("job_00002", spec, name="same"),
        job("job_00003", spec, sweep="job_0", parameters={"optimizer.lr": 0.1}),
    ]
    assert run("compare", "names", jobs) == ["same (00001)", "same (00002)", "lr=0.1"]


def test_swept_fields_are_named_by_what_tells_them_apart(run: Any) -> None:
    parameters = {"model.hidden.0": 16, "optimizer.lr": 0.1, "a.eps": 1, "b.eps": 2}
    one = job("job_00003", {"kind": "train"}, sweep="job_0", parameters=parameters)
    assert run("compare", "swept", one) == "hidden.0=16, lr=0.1, a.eps=1, b.eps=2"
    assert run("compare", "swept", one | {"sweep": None}) == ""
    texts = {"method": "beta-crown", "data.source": "true", "name": "a, b"}
    assert run("compare", "swept", one | {"parameters": texts}) == 'method=beta-crown, source="true", name="a, b"'
    assert run("compare", "swept", one | {"parameters": {"job": "train"}}) == "train"  # its name in a chain


def test_what_is_missing_is_last_in_either_order(run: Any) -> None:
    values = [None, 10, 9.5, -1]
    assert run("compare", "order", values, False) == [3, 2, 1, 0]
    assert run("compare", "order", values, True) == [1, 2, 3, 0]
    assert run("compare", "order", ["b10", "b9", "a"], False) == [2, 1, 0]


def test_a_saved_table_is_csv_without_formulas(run: Any) -> None:
    head, rows = ["name", "value"], [['a "b", c', 1.5], ["=1+1", None], ["two\nlines", [1, 2]]]
    read = list(csv.reader(io.StringIO(run("compare", "csv", head, rows), newline="")))
    assert read == [head, ['a "b", c', "1.5"], ["'=1+1", ""], ["two\nlines", "[1,2]"]]
