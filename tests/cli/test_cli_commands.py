"""Commands that submit jobs and show the queue, against a real service, as processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from cli_world import TRAIN, Cli, Worker
from waiting import eventually

from service.jobs.store import JobFilter, Store
from trivet.cli.main import PARTS, program
from trivet.client import Client


def test_a_command_is_registered_by_the_one_module_that_is_said_to_have_it() -> None:
    def commands(*words: str) -> set[str]:
        return set(typer.main.get_group(program(words)).commands)

    for names in PARTS.values():
        assert [commands(name) for name in names] == [set(names)] * len(names)
    assert commands("no-such") == commands() == {name for names in PARTS.values() for name in names}


def test_submit_prints_the_id_and_only_that(trivet: Cli, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    assert store.jobs.get(job_id).name == "mine"


def test_submit_reads_yaml_from_standard_input_and_sets_values(trivet: Cli, store: Store) -> None:
    model = "{family: mlp, in_features: 64, hidden: [8, 8], out_features: 10}"
    text = f"kind: train\nmodel: {model}\ndata: {{source: digits}}\nsteps: 1\n"
    changes = [
        "steps=7",
        "model.hidden.1=32",
        "labels.team=a",
        "optimizer.lr=1e-2",
        "name=null me",
        "batch={global: 32}",
    ]
    words = [word for change in changes for word in ("--set", change)]
    job = trivet.ok("submit", "-", *words, "--json", stdin=text).json
    spec = job["spec"]
    assert (spec["steps"], spec["model"]["hidden"], spec["labels"]) == (7, [8, 32], {"team": "a"})
    assert (spec["optimizer"]["lr"], spec["name"], spec["batch"]["global"]) == (0.01, "null me", 32)


def test_a_spec_is_validated_without_being_submitted(trivet: Cli, store: Store) -> None:
    assert "would be accepted, 1 job of 1 rank\n" in trivet.ok("validate", trivet.spec()).out
    swept = ("--set", "sweep={grid: {seed: [1, 2]}}", "--set", "parallel.tp=2", "--json")
    assert [(each["jobs"], each["ranks"]) for each in trivet.ok("validate", trivet.spec(), *swept).json] == [(2, 2)]
    asked = "notify={webhook: https://example.org/, when: {loss: low}}"
    refused = trivet("validate", trivet.spec(), "--set", asked)
    assert (refused.code, "notify.when.loss" in refused.err, "--set" in refused.err) == (2, True, True)
    assert store.jobs.list().items == ()


def test_several_specs_are_submitted_all_or_none(trivet: Cli, store: Store) -> None:
    other = trivet.folder / "other.yaml"
    other.write_text(Path(trivet.spec()).read_text().replace("mine", "other"))
    ids = trivet.ok("submit", trivet.spec(), str(other), "--set", "labels.team=a").out.split()
    assert [store.jobs.get(job_id).name for job_id in ids] == ["mine", "other"]
    assert [store.jobs.get(job_id).labels for job_id in ids] == [{"team": "a"}] * 2
    refused = trivet("submit", trivet.spec(), trivet.spec(), "--set", "stepps=1")
    assert refused.code == 2
    assert "jobs.1.stepps" in refused.err
    assert len(store.jobs.list().items) == 2


def test_a_batch_is_a_file_with_a_list_of_specs(trivet: Cli, store: Store, worker: Worker) -> None:
    specs = [{**TRAIN, "name": f"run {index}"} for index in range(3)]
    ids = trivet.ok("submit", "--batch", "-", "--json", stdin=json.dumps(specs)).json
    assert [store.jobs.get(job_id).name for job_id in ids] == ["run 0", "run 1", "run 2"]
    for words in (["submit"], ["submit", trivet.spec(), "--batch", "-"]):
        assert "--batch" in trivet(*words).err
    assert "a batch is a list of specs" in trivet("submit", "--batch", trivet.spec()).err
    wrong = trivet.folder / "wrong.yaml"
    wrong.write_text(json.dumps([TRAIN, {**TRAIN, "stepps": 1}]).replace("}, {", "},\n{"))
    assert "wrong.yaml:2:" in trivet("submit", "--batch", str(wrong)).err
    many = trivet("submit", "--batch", "-", "--watch", stdin=json.dumps(specs * 34))
    assert (many.code, "100 jobs at most" in many.err) == (2, True)


def test_a_parent_says_how_long_it_takes_and_why_a_job_of_it_failed(trivet: Cli, store: Store, worker: Worker) -> None:
    parent = trivet.ok("submit", trivet.spec(sweep={"grid": {"seed": [1, 2]}})).out.strip()
    first = store.jobs.list(JobFilter(sweep=parent)).items[-1].id
    worker.end(worker.start(first), error="no such thing\nat all")
    lines = [line.split(maxsplit=3) for line in trivet.ok("show", parent).out.splitlines()]
    assert [first, "1", "failed", "ValueError: no such thing"] in lines
    assert "took" in [words[0] for words in lines if words]


@pytest.mark.slow
def test_watching_a_sweep_ends_with_a_table_of_its_jobs(trivet: Cli, store: Store, worker: Worker) -> None:
    sweep: dict[str, Any] = {"grid": {"optimizer.lr": [0.1, 0.2]}, "best": {"metric": "loss", "mode": "min"}}
    sweep["stop"] = {"rule": "halving", "metric": "eval_loss", "mode": "min", "factor": 2, "first": 1}
    process = trivet.start("submit", trivet.spec(sweep=sweep, steps=2, evaluate={"every": 1}), "--watch")
    eventually(lambda: len(store.jobs.list().items) == 3)
    second, first, parent = (job.id for job in store.jobs.list().items)
    worker.end(worker.start(first), loss=0.5)
    worker.end(worker.start(second), loss=0.25, steps=1, ended_early="stopped early by the sweep")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, f"submitted {parent}\n")
    rows = [line.split() for line in out.splitlines() if line.startswith("job_")]
    assert rows == [[first, "0.1", "succeeded", "0.5"], [second, "0.2", "succeeded", "0.25", "step", "1"]]
    assert f"best: {second}, loss 0.25" in out
    assert first in trivet.ok("show", parent).out
    assert trivet.ok("jobs", "--sweep", parent, "--json").json["items"][0]["parameters"] == {"optimizer.lr": 0.2}
    for given, listed in ((), [parent]), (("--sweep", "all"), [second, first, parent]):
        assert [job["id"] for job in trivet.ok("jobs", "--json", *given).json["items"]] == listed


@pytest.mark.slow
def test_watching_a_batch_exits_1_unless_all_succeed(trivet: Cli, store: Store, worker: Worker) -> None:
    process = trivet.start("submit", "--batch", "-", "--watch")
    assert process.stdin is not None
    process.stdin.write(json.dumps([TRAIN, TRAIN]))
    process.stdin.close()
    process.stdin = None
    eventually(lambda: len(store.jobs.list().items) == 2)
    second, first = (job.id for job in store.jobs.list().items)
    worker.end(worker.start(first), loss=0.5)
    store.jobs.cancel(second)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err.split()) == (1, [first, second])
    assert f"train mine {first}: succeeded" in out
    assert f"train mine {second}: cancelled" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps", "path=value"),
        ("steps.x=1", "no parts"),
        ("model.hidden.9=1", "position"),
        ("model.hidden.a=1", "position"),
        ("steps=[1", "YAML"),
        ("=1", "path=value"),
        ("steps=.inf", "steps is inf; expected a finite number"),
        ("optimizer.lr=.nan", "optimizer.lr is nan; expected a finite number"),
        ("model.hidden.0=1.0e+400", "model.hidden.0 is inf; expected a finite number"),
        ("name=!!binary aGk=", "name is a bytes of YAML"),
        ("labels={1: a}", "labels has the field 1; a field's name must be text"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(trivet: Cli, store: Store, change: str, said: str) -> None:
    ran = trivet("submit", trivet.spec(), "--set", change)
    assert ran.code == 2
    assert said in ran.err
    assert not store.jobs.list().items


@pytest.mark.parametrize(
    ("content", "said"), [("[1, 2]", "a list"), ("", "nothing"), ("{a: ", "neither YAML nor JSON")]
)
def test_a_file_that_is_no_spec_is_refused(trivet: Cli, content: str, said: str) -> None:
    path = trivet.folder / "bad.yaml"
    path.write_text(content)
    ran = trivet("submit", str(path))
    assert ran.code == 2
    assert said in ran.err
    assert trivet("submit", "missing.yaml").code == 2


def test_a_refused_spec_is_a_table_of_fields(trivet: Cli) -> None:
    ran = trivet("submit", trivet.spec(steps=0, stepz=1))
    assert ran.code == 2
    assert "2 problems" in ran.err
    for word in ("steps", "at least 1", "stepz", "did you mean 'steps'?"):
        assert word in ran.err


def test_a_path_where_an_uploaded_file_is_wanted_is_told_how_to_get_its_id(trivet: Cli) -> None:
    ran = trivet("submit", trivet.spec(kind="verify"), "--set", "property={vnnlib: /tmp/queries.zip}")
    assert ran.code == 2
    assert "expected a file's id, as `trivet upload FILE` prints it" in ran.err
    data = "data={source: file, file: /tmp/x, format: tokens, sequence: 4, vocabulary: 9}"
    here = trivet("schedule", trivet.spec(), "--set", data)
    assert here.code == 2
    assert here.err.endswith("file: expected a file's id, as `trivet upload FILE` prints it; got '/tmp/x'\n")
    assert len(here.err.splitlines()) == 1


def test_an_uploaded_file_has_one_id_however_often_it_comes(trivet: Cli, store: Store) -> None:
    path = trivet.folder / "tokens.bin"
    path.write_bytes(b"\x01\x02" * 500)
    file_id = trivet.ok("upload", str(path)).out.strip()
    assert trivet.ok("upload", str(path), "--json").json["id"] == file_id
    stored, held = store.files.get(file_id)
    assert (stored.bytes, held.read_bytes()) == (1000, path.read_bytes())
    assert trivet("upload", "missing.bin").code == 2
    assert trivet.ok("upload", str(path), str(path)).out.split() == [file_id, file_id]


def test_set_uploads_the_files_that_it_names(trivet: Cli, store: Store) -> None:
    content = b"\x01\x02" * 500
    for name in ("tokens.bin", "two words.bin"):
        (trivet.folder / name).write_bytes(content)
    trivet.ok("validate", trivet.spec(), "--set", "labels.about=@tokens.bin")
    file_id = trivet.ok("upload", "tokens.bin").out.strip()
    job = trivet.ok("submit", trivet.spec(), "--set", "labels={a: @tokens.bin, b: a@b}", "--set", "name=@two words.bin")
    spec = trivet.ok("show", job.out.strip(), "--json").json["spec"]
    assert spec["labels"] == {"a": file_id, "b": "a@b"}
    assert spec["name"] == file_id
    assert store.files.get(file_id)[1].read_bytes() == content

    refused = trivet("submit", trivet.spec(), "--set", "labels.about=@missing.bin")
    assert (refused.code, refused.err) == (2, "--set: cannot read missing.bin: there is no such file or folder\n")
    offered = trivet("submit", trivet.spec(kind="verify"), "--set", "property={vnnlib: tokens.bin}")
    assert "--set property.vnnlib=@tokens.bin" in " ".join(offered.err.split())


def test_a_missing_spec_is_told_where_one_comes_from(trivet: Cli) -> None:
    ran = trivet("submit", "my-verify.yaml")
    assert ran.err == "cannot read my-verify.yaml: No such file or directory; `trivet init verify` writes a first one\n"
    (trivet.folder / "examples").mkdir()
    (trivet.folder / "examples" / "train.yaml").touch()
    assert trivet("submit", "train.yaml").err.endswith("; did you mean examples/train.yaml?\n")


PIPELINE: dict[str, Any] = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b", "micro_batches": 3}}
ROWS = ["rank 0  F0 F1 ······B0    F2 B1    ···B2", "rank 1  ···F0 B0    F1 B1    F2 B2"]


def test_a_schedule_is_drawn_from_a_spec_without_a_service(trivet: Cli) -> None:
    ran = trivet("schedule", trivet.spec(**PIPELINE), TRIVET_URL="http://127.0.0.1:9")
    assert ran.code == 0, ran.err
    drawn = [line.rstrip() for line in ran.out.splitlines()]
    assert drawn[0] == "1f1b: 2 ranks, 2 stages, 3 micro-batches; predicted bubble 25.0%"
    assert drawn[2:4] == ROWS
    assert "activations kept at most, by rank: 2, 1" in drawn
    split = trivet.ok("schedule", trivet.spec(**PIPELINE), "--set", "pipeline.schedule=zbv").out
    assert "W backward weight" in split
    assert "f0" in split
    assert trivet("schedule", trivet.spec()).code == 2
    refused = trivet(
        "schedule", trivet.spec(**PIPELINE), "--set", "pipeline.micro_batches=99999", "--set", "batch.global=99999"
    )
    assert refused.code == 2
    assert "pipeline.micro_batches" in refused.err


def test_the_queue_says_why_jobs_wait(trivet: Cli, worker: Worker) -> None:
    running = trivet.ok("submit", trivet.spec(), "--set", "timeout_s=3600").out.strip()
    worker.start(running)
    jobs = [trivet.ok("submit", trivet.spec(), "--set", "after=" + json.dumps([running])).out.strip()]
    page = trivet.ok("queue", "--json").json
    assert [(line["job"], line["place"]) for line in page["items"]] == [(jobs[0], None)]
    assert f"waits for {running}" in trivet.ok("queue").out
    assert jobs[0] in trivet.ok("queue", jobs[0]).out
    assert "nothing waits" in trivet.ok("queue", "--owner", "nobody").out
    assert "not a cursor of the queue" in trivet("queue", "--cursor", "x").err
    trivet.ok("projects", "create", "vision")
    assert "vision has weight 2" in trivet.ok("shares", "weigh", "vision", "2").out
    assert {share["project"] for share in trivet.ok("shares", "--json").json["items"]} == {"default", "vision"}


@pytest.mark.slow
def test_a_jobs_schedule_and_timeline(trivet: Cli, worker: Worker, url: str, secret: str) -> None:
    job_id = trivet.ok("submit", trivet.spec(**PIPELINE, batch={"global": 6})).out.strip()
    assert all(row in trivet.ok("schedule", job_id).out for row in ROWS)
    assert trivet.ok("schedule", job_id, "--json").json["bubble"] == 0.25
    worker.emit(worker.start(job_id), [{"type": "span", "name": "data", "start": 1, "end": 2, "detail": {"step": 1}}])
    with Client(url, secret) as client:
        assert client.timeline(job_id)["step"] == 1
    plain = trivet.ok("submit", trivet.spec()).out.strip()
    ran = trivet("schedule", plain)
    assert ran.code == 2
    assert "has no pipeline" in ran.err
