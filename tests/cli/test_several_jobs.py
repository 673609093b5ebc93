"""Commands for several jobs, why jobs are where they are, completion of ids, and where a refused field stands."""

from __future__ import annotations

import pytest
import yaml
from cli_world import TRAIN, Cli, Worker
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.store import Store
from service.jobs.text.documents import nearest, positions
from trivet.cli import context
from trivet.cli.submit import result_lines

FIELDS = st.recursive(
    st.one_of(st.integers(), st.text(st.characters(codec="ascii"), max_size=5), st.none(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), inner, min_size=1, max_size=3),
    ),
    max_leaves=12,
)


@pytest.mark.slow
def test_one_that_cannot_be_cancelled_is_named_and_the_others_are(trivet: Cli, store: Store) -> None:
    first, second = (trivet.ok("submit", trivet.spec()).out.strip() for _ in range(2))
    ran = trivet("cancel", first, "job_00000000000000000000", second)
    assert ran.code == 2
    assert [line.split()[0] for line in ran.out.splitlines()] == [first, second]
    assert "job_00000000000000000000" in ran.err
    assert {store.jobs.get(each).state for each in (first, second)} == {"cancelled"}
    again = trivet.ok("retry", first, second, "--json").json
    assert [job["id"] for job in again["items"]] == [first, second]
    trivet.ok("cancel", first, second)
    assert trivet("delete", first, second, stdin="n\n").code == 2
    trivet.ok("delete", first, second, "--yes")
    assert not store.jobs.list().items


def test_jobs_are_deleted_by_filters_once_it_is_confirmed(trivet: Cli, store: Store) -> None:
    old, other = (trivet.ok("submit", trivet.spec(labels={"paper": name})).out.strip() for name in "ab")
    for each in (old, other):
        store.jobs.cancel(each)
    words = ("delete", "--label", "paper=a", "--older-than", "0s")
    assert trivet.ok(*words, "--dry-run").out == "1 would be deleted, 0 not\n"
    declined = trivet(*words, stdin="n\n")
    assert declined.code == 2
    assert "delete 1 job and its artifacts?" in declined.out
    assert trivet.ok("delete", "--label", "paper", "--older-than", "1d", "--yes").out == "0 deleted, 0 not\n"
    assert trivet.ok(*words, "--yes", "--json").json == {"jobs": [old], "kept": {}}
    assert [job.id for job in store.jobs.list().items] == [other]
    assert "name jobs" in trivet("delete").err
    assert "--query: got an empty text" in trivet("delete", "-q", "", "--kind", "train", "--yes").err


@pytest.mark.slow
def test_a_list_says_why_a_job_waits_or_failed_and_that_there_are_more(trivet: Cli, worker: Worker) -> None:
    first = trivet.ok("submit", trivet.spec()).out.strip()
    trivet.ok("submit", trivet.spec(after=[first]))
    assert f"waits for {first}" in trivet.ok("jobs").out
    worker.end(worker.start(first), "the loss is not finite")
    assert "ValueError: the loss is not finite" in trivet.ok("jobs", "--state", "failed").out
    shown = trivet.ok("jobs", "--limit", "1")
    assert "these are the newest 1; --limit shows more" in shown.err


def test_a_metric_that_an_ended_job_does_not_have_is_refused(trivet: Cli, worker: Worker) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    assert trivet.ok("metrics", job_id, "lss").out.strip() == "no metrics yet"
    silent = trivet.ok("submit", trivet.spec()).out.strip()
    worker.end(worker.start(silent))
    assert trivet.ok("metrics", silent).out.strip() == "this job reported no metrics"
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "metric", "step": 1, "values": {"loss": 1.0, "lr": 0.1}}])
    worker.end(ref)
    ran = trivet("metrics", job_id, "lss", "lr")
    assert ran.code == 2
    assert f"job {job_id} has no metric 'lss'; it has: loss, lr" in ran.err


def test_a_refused_field_is_pointed_at_in_its_file(trivet: Cli) -> None:
    path = trivet.folder / "spec.yaml"
    path.write_text(
        "kind: train\nmodel:\n  family: mlp\n  in_features: 64\n  hidden: [8, -1]\n  out_features: 10\n"
        "data: {source: digits}\nsteps: 5\n"
    )
    ran = trivet("submit", str(path), "--set", "optimizer.lr=-1")
    assert ran.code == 2
    lines = [line.split() for line in ran.err.splitlines()]
    firsts = [words[0] for words in lines]
    assert lines[firsts.index("model.hidden.1:") + 3] == ["at", "spec.yaml:5:15"]
    assert lines[firsts.index("optimizer.lr:") + 3] == ["at", "--set"]
    missing = trivet("submit", "-", stdin="kind: train\nsteps: 3\n")
    assert "standard input:1:1" in missing.err


@given(FIELDS)
def test_every_field_of_a_document_has_its_position(value: object) -> None:
    text = yaml.safe_dump({"spec": value})
    found = positions(text)

    def check(path: str, part: object) -> None:
        line, column = found[path]
        name = path.rpartition(".")[2]
        rest = text.split("\n")[line - 1][column - 1 :]
        assert name.isdigit() or rest.startswith((name, f"'{name}'", f'"{name}"', "? "))
        inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, each in inner:
            check(f"{path}.{key}", each)

    check("spec", value)
    assert nearest(found, "spec.nothing.there") == found["spec"]


def test_an_alias_that_holds_itself_ends() -> None:
    assert positions("a: &x {b: *x}\n") == {}, "such a spec is refused as a whole"


def test_ids_are_completed_by_the_service_and_by_nothing_where_there_is_none(
    trivet: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    for name, value in trivet.variables.items():
        monkeypatch.setenv(name, value)
    assert context.job_ids("job_") == [(job_id, f"queued train {TRAIN['name']}")]
    assert context.job_ids("other") == []
    monkeypatch.setenv("TRIVET_URL", "http://127.0.0.1:9")
    assert context.job_ids("job_") == []


def test_a_result_is_told_in_lines() -> None:
    result = {
        "verdicts": {"verified": 60, "falsified": 4}, "mean_width": 0.123456, "eps": None, "parameters": 26122,
        "summary": ["One.", "Two."], "gate": {"train": None, "worth": {"train": {}}}, "completed": {"done": 1},
    }  # fmt: skip
    assert list(result_lines(result)) == [
        "verdicts: verified 60, falsified 4", "mean width: 0.1235", "parameters: 26,122", "One.", "Two.",
    ]  # fmt: skip


def test_the_version_is_that_of_the_package(trivet: Cli) -> None:
    assert trivet.ok("--version").out == "trivet 0.1.0\n"
