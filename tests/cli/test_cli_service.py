"""Commands for the fleet, keys, projects and uploads, and what every command does when it is used wrongly."""

from __future__ import annotations

import hashlib
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cli_world import Cli, Worker
from waiting import eventually

from service.jobs.records import AllocatedDevices, Artifact, Overcommitment
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import HOST
from trivet.cli.main import OTHER_NAMES


def fetch_to_odd_places(trivet: Cli, job_id: str, content: bytes) -> None:
    """Into a folder, through a link, into a pipe, to a device; what is none of a file keeps its place."""
    here, fetch = trivet.folder, ("artifacts", job_id, "sub/model.bin", "-o")
    (here / "out").mkdir()
    (here / "link.bin").symlink_to("linked.bin")
    os.mkfifo(here / "pipe")
    trivet.ok(*fetch, "out/")
    assert (here / "out" / "model.bin").read_bytes() == content
    trivet.ok(*fetch, "link.bin")
    assert (here / "link.bin").is_symlink()
    assert (here / "linked.bin").read_bytes() == content
    with subprocess.Popen(["cat", here / "pipe"], stdout=subprocess.PIPE) as reader:
        trivet.ok(*fetch, "pipe")
        assert reader.communicate()[0] == content
    assert (here / "pipe").is_fifo()
    trivet.ok(*fetch, "/dev/null")
    full = trivet(*fetch, "/dev/full")
    assert (full.code, "No space left" in full.err) == (2, True)
    assert Path("/dev/null").is_char_device()
    assert Path("/dev/full").is_char_device()
    for place, said in (("no/", "there is no folder no/"), ("no/x", "no such folder"), ("got.bin/x", "no such folder")):
        ran = trivet(*fetch, place)
        assert (ran.code, said in ran.err) == (2, True), ran.err
    assert trivet.start(*fetch, "/dev/stdout").communicate()[0].encode() == content


def test_artifacts_are_listed_and_fetched_whole(trivet: Cli, worker: Worker, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    assert "no artifacts" in trivet.ok("artifacts", job_id).out
    ref, content = worker.start(job_id), b"\x00weights" * 100
    path = store.artifacts.data.job(job_id).artifacts / "sub" / "model.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    store.attempts.record_artifact(
        ref,
        Artifact(
            name="sub/model.bin", bytes=len(content), sha256=digest, media_type="x/y", created_at=datetime.now(UTC)
        ),
    )
    assert digest[:16] in trivet.ok("artifacts", job_id).out
    trivet.ok("artifacts", job_id, "sub/model.bin", "-o", "got.bin")
    assert (trivet.folder / "got.bin").read_bytes() == content
    trivet.ok("artifacts", job_id, "sub/model.bin")
    assert (trivet.folder / "model.bin").read_bytes() == content
    fetch_to_odd_places(trivet, job_id, content)
    before = sorted(trivet.folder.iterdir())
    assert trivet("artifacts", job_id, "nothing", "-o", "none.bin").code == 2
    assert sorted(trivet.folder.iterdir()) == before


def test_hosts_drain_and_resume(trivet: Cli, worker: Worker) -> None:
    assert "no hosts" in trivet.ok("hosts").out
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    worker.start(job_id)
    text = trivet.ok("hosts").out
    assert all(word in text for word in ("fake", "alive", "3/4", job_id))
    assert "draining" in trivet.ok("hosts", "drain", "fake").out
    assert trivet.ok("hosts", "--json").json["items"][0]["draining"] is True
    trivet.ok("hosts", "resume", "fake")
    assert trivet("hosts", "drain", "nobody").code == 2


def test_hosts_says_who_overcommits_a_host(trivet: Cli, worker: Worker) -> None:
    by = [{"job": "job_1", "program": "", "threads": 90}]
    found = Overcommitment.model_validate({"load": 97.0, "cores": 16, "by": by})
    worker.store.hosts.beat(HostReport("fake", "127.0.0.1", cpu_slots=4, overcommitted=found))
    text = " ".join(trivet.ok("hosts").out.split())
    assert "fake is overcommitted: 97 threads on average compete for its 16 cores; now job_1 90" in text


def test_alerts_say_what_is_wrong_and_what_to_do(trivet: Cli, worker: Worker) -> None:
    worker.store.hosts.beat(HostReport("fake", "127.0.0.1", cpu_slots=4))
    failing = ("failing_since", 1, "failing_reason", "no torch", "failed_starts", 2, "retry_at", 1)
    worker.store.client.call("HSET", HOST("fake"), *failing)
    told = trivet("alerts", "--all")
    assert told.code == 1
    assert "TrivetHostFailing" in told.out
    assert "host=fake" in told.out
    assert "TrivetDiskFull" in told.out, "an alert that is as it should be"
    fired = [alert for alert in trivet("alerts", "--json").json["items"] if alert["state"] == "firing"]
    assert [(alert["name"], alert["labels"]) for alert in fired] == [("TrivetHostFailing", {"host": "fake"})]


def test_hosts_shows_what_launchers_have_and_their_allocations(trivet: Cli, worker: Worker) -> None:
    has = AllocatedDevices(launcher="slurm", id="12.0", job=None, pool="cpu", devices=2)
    worker.store.hosts.beat(HostReport("login", "127.0.0.1", launchers={"slurm": "main: 1 of 2 nodes idle"}))
    worker.store.hosts.beat(HostReport("slurm-12.0-0", "127.0.0.1", allocation=has))
    text = " ".join(trivet.ok("hosts").out.split())
    assert "slurm, asked by login: main: 1 of 2 nodes idle" in text
    assert "slurm-12.0-0 alive slurm 12.0" in text
    (login, node) = trivet.ok("hosts", "--json").json["items"]
    assert (login["allocation"], node["allocation"]["devices"]) == (None, 2)


@pytest.mark.slow
def test_hosts_says_why_a_host_gets_no_work(trivet: Cli, worker: Worker) -> None:
    jobs = [trivet.ok("submit", trivet.spec()).out.strip() for _ in range(2)]
    worker.never_claim(jobs)
    text = " ".join(trivet.ok("hosts").out.split())
    assert "failing" in text
    assert "fake gets no work since" in text
    assert "nobody on host fake claimed the job in time; tried again in" in text
    assert trivet.ok("hosts", "--json").json["items"][0]["failing"]["failed_starts"] == 2
    assert "takes jobs" in trivet.ok("hosts", "resume", "fake").out
    assert "failing" not in trivet.ok("hosts").out


def test_keys_are_created_used_listed_and_revoked(trivet: Cli) -> None:
    secret = trivet.ok("keys", "create", "ann", "--scope", "read").out.strip()
    assert trivet("jobs", TRIVET_KEY=secret).code == 0
    refused = trivet("submit", trivet.spec(), TRIVET_KEY=secret)
    assert refused.code == 2
    assert "scope 'submit'" in refused.err
    listed = {key["name"]: key for key in trivet.ok("keys", "list", "--json").json["items"]}
    assert listed["ann"]["scopes"] == ["read"]
    assert "ann" in trivet.ok("keys", "list").out
    trivet.ok("keys", "revoke", listed["ann"]["id"])
    gone = trivet("jobs", TRIVET_KEY=secret)
    assert gone.code == 2
    assert "TRIVET_KEY" in gone.err


@pytest.mark.slow
def test_projects_have_members_and_share_jobs(trivet: Cli) -> None:
    assert trivet.ok("projects", "create", "vision", "--description", "cameras").out.strip() == "vision"
    ann = trivet.ok("keys", "create", "ann", "--project", "vision", "--role", "submitter").out.strip()
    assert trivet("keys", "create", "ann", "--role", "submitter").code == 2
    assert trivet("keys", "create", "ann", "--project", "vision", "--role", "boss").code == 2
    ours = trivet.ok("submit", trivet.spec()).out.strip()
    theirs = trivet.ok("submit", trivet.spec(), "--project", "vision").out.strip()
    seen = trivet("jobs", "--json", TRIVET_KEY=ann)
    assert [job["id"] for job in seen.json["items"]] == [theirs]
    hidden = trivet("show", ours, TRIVET_KEY=ann)
    assert (hidden.code, "there is no job" in hidden.err) == (2, True)
    assert "vision" in trivet.ok("share", ours, "vision").out
    assert trivet("show", ours, TRIVET_KEY=ann).code == 0
    trivet.ok("share", ours, "vision", "--stop")
    assert trivet("show", ours, TRIVET_KEY=ann).code == 2
    trivet.ok("projects", "members", "set", "vision", "ann", "viewer")
    shown = trivet("projects", "show", "vision", TRIVET_KEY=ann)
    assert "cameras" in shown.out
    assert "viewer" in shown.out
    assert trivet("projects", "members", "set", "vision", "ann", "maintainer", TRIVET_KEY=ann).code == 2
    trivet.ok("projects", "members", "remove", "vision", "ann")
    assert trivet("jobs", TRIVET_KEY=ann).code == 2
    trivet.ok("projects", "set", "vision", "--description", "lidar")
    listed = trivet.ok("projects", "list", "--json").json["items"]
    assert [(project["name"], project["description"]) for project in listed][1:] == [("vision", "lidar")]
    assert "1 keys" in trivet("projects", "delete", "vision").err


@pytest.mark.slow
def test_quotas_are_set_shown_and_taken_away(trivet: Cli) -> None:
    trivet.ok("projects", "create", "audio")
    set_now = trivet.ok("projects", "set", "audio", "--quota", "queued_jobs=1", "--quota", "default_time_s=60")
    assert "queued_jobs: 0 of 1" in set_now.out
    assert "default_time_s: 60" in set_now.out
    trivet.ok("submit", trivet.spec(), "--project", "audio")
    refused = trivet("submit", trivet.spec(), "--project", "audio")
    assert (refused.code, "1 of 1 queued jobs" in refused.err) == (2, True)
    trivet.ok("projects", "set", "audio", "--quota", "queued_jobs=")
    shown = trivet.ok("projects", "show", "audio", "--json").json
    assert (shown["quotas"]["queued_jobs"], shown["usage"]["queued_jobs"]) == (None, 1)
    for words, said in (("queued_jobs", "queued_jobs="), ("nonsense=1", "nonsense"), ("queued_jobs=x", "queued_jobs")):
        wrong = trivet("projects", "set", "audio", "--quota", words)
        assert (wrong.code, said in wrong.err) == (2, True)


@pytest.mark.slow
def test_uploads_are_listed_and_deleted(trivet: Cli) -> None:
    assert "no uploads" in trivet.ok("uploads").out
    (trivet.folder / "words.txt").write_text("some words")
    file_id = trivet.ok("upload", "words.txt").out.split()[0]
    listed = trivet.ok("uploads").out
    assert all(word in listed for word in (file_id, "words.txt", "10"))
    (entry,) = trivet.ok("uploads", "--json").json["items"]
    assert (entry["id"], entry["bytes"], entry["in_use"]) == (file_id, 10, False)
    trivet.ok("uploads", "delete", file_id)
    assert "no uploads" in trivet.ok("uploads").out
    gone = trivet("uploads", "delete", file_id)
    assert (gone.code, file_id in gone.err) == (2, True)


def test_a_service_that_is_not_there_is_named_with_what_to_do(trivet: Cli) -> None:
    ran = trivet("jobs", TRIVET_URL="http://127.0.0.1:9")
    assert ran.code == 2
    assert "http://127.0.0.1:9" in ran.err
    assert "trivet up" in ran.err
    assert trivet("jobs", TRIVET_URL="ftp://x").code == 2
    for url in ("http://ann:secret@127.0.0.1:9", "http://127.0.0.1:9?project=a", "https://a..b", "http://[::1"):
        told = trivet("jobs", TRIVET_URL=url).err
        assert ("is not the address of a service" in told, "secret" in told) == (True, False)


def test_settings_lists_every_setting_with_its_source(trivet: Cli) -> None:
    (trivet.folder / "trivet.toml").write_text("port = 9999\n")
    lines = {line["variable"]: line for line in trivet.ok("settings", "--json").json["settings"]}
    assert (lines["TRIVET_PORT"]["value"], lines["TRIVET_PORT"]["source"]) == ("9999", "trivet.toml")
    assert lines["TRIVET_URL"]["source"] == "environment"
    assert "tvt_" not in trivet.ok("settings").out
    bad = trivet("settings", TRIVET_PORT="x")
    assert bad.code == 2
    assert "port" in bad.err


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["submit"],
        ["show"],
        ["jobs", "--limit", "0"],
        ["jobs", "--csv", "--json"],
        ["logs", "x", "-n", "x"],
    ],
)
def test_wrong_usage_exits_2(trivet: Cli, words: list[str]) -> None:
    assert trivet(*words).code == 2


def test_a_command_of_another_tool_is_answered_with_ours(trivet: Cli) -> None:
    wrong = trivet("ls")
    assert (wrong.code, "Did you mean 'jobs'?" in wrong.err) == (2, True)
    text = trivet.ok("--help").out
    assert all(f"  {name} " in text for name in OTHER_NAMES.values())
    assert not any(f"  {name} " in text for name in OTHER_NAMES)


def test_help_names_every_promised_command(trivet: Cli) -> None:
    text = trivet.ok("--help").out
    promised = (
        "up api worker submit jobs show watch logs metrics bounds report cancel retry artifacts hosts keys projects"
    )
    assert all(f" {name} " in text for name in [*promised.split(), "settings", "demo"])


@pytest.mark.slow
def test_output_into_a_closed_pipe_is_no_error(trivet: Cli, worker: Worker) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "log", "stream": "stdout", "line": "x" * 500} for _ in range(2000)])
    process = trivet.start("logs", job_id)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    eventually(lambda: process.poll() is not None)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_no_data_folder_is_made_by_asking(trivet: Cli) -> None:
    trivet.ok("jobs")
    assert not Path(trivet.folder / ".trivet").exists()
