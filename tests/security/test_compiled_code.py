"""Compiled code, which to load is to run, comes from jobs of the same owner only, as their manifest has it (B1)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from waiting import eventually
from worker_fleet import HOST, REAL_SUPERVISOR, Fleet, train_spec

from service.jobs.records import Artifact, AttemptRef, Claim, HostShare
from service.jobs.spec.compile import CompileSpec
from service.jobs.store.keyspace import JOB_ARTIFACTS
from workers.supervisor import attempt_folder
from workers.supervisor.attempt_folder import compile_cache, gate_artifacts


def submit_gate(fleet: Fleet, owner: str, project: str = "default") -> str:
    """A compile job of ``owner`` with a cache and a folder in its manifest."""
    spec = CompileSpec.model_validate({"model": train_spec("x").model.model_dump(), "device": "cpu"})
    job, _ = fleet.store.jobs.submit(spec, owner, project=project)
    for name, digest in (("compile_cache/train-inductor-0.bin", "ab" * 32), ("traces", "")):
        artifact = Artifact.model_validate(
            {"name": name, "bytes": 1, "sha256": digest, "media_type": "x/y", "created_at": "2026-01-01T00:00:00Z"}
        )
        fleet.store.jobs.client.call("HSET", JOB_ARTIFACTS(job.id), name, artifact.model_dump_json())
    return job.id


@pytest.mark.parametrize(("owner", "known"), [("ada", {"compile_cache/train-inductor-0.bin": "ab" * 32}), ("eve", {})])
def test_only_a_gate_of_the_same_owner_vouches_for_compiled_code(
    fleet: Fleet, owner: str, known: dict[str, str]
) -> None:
    gate = submit_gate(fleet, owner)
    spec = train_spec("trained", compile={"train": True, "gate": gate})
    job, _ = fleet.store.jobs.submit(spec, "ada")
    claim = Claim(AttemptRef(job.id, 1, HOST), spec, (HostShare(host=HOST, devices=(0,)),), "127.0.0.1", 15.0)
    assert gate_artifacts(fleet.store, claim) == ("ada", {}), "its submission did not name the gate"
    claim = dataclasses.replace(claim, needed=frozenset({gate}))
    assert gate_artifacts(fleet.store, claim) == ("ada", known)
    alone = dataclasses.replace(claim, spec=train_spec("without a gate"))
    assert gate_artifacts(fleet.store, alone) == ("ada", {})


def test_a_gate_of_the_same_name_in_another_project_vouches_for_nothing(fleet: Fleet) -> None:
    """That owner may be somebody else, though the job was shared."""
    fleet.store.projects.create("blue")
    gate = submit_gate(fleet, "ada", "blue")
    fleet.store.jobs.share(gate, "default")
    spec = train_spec("trained", compile={"train": True, "gate": gate})
    job, _ = fleet.store.jobs.submit(spec, "ada")
    claim = Claim(
        AttemptRef(job.id, 1, HOST), spec, (HostShare(host=HOST, devices=(0,)),), "127.0.0.1", 15.0,
        needed=frozenset({gate}),
    )  # fmt: skip
    assert gate_artifacts(fleet.store, claim) == ("ada", {})


def test_owners_have_a_private_cache_each_and_none_that_another_user_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_folder.tempfile, "tempdir", str(tmp_path))
    ada, eve = compile_cache("ada"), compile_cache("../eve")
    assert ada != eve
    assert ada == compile_cache("ada")
    for folder in (ada, eve):
        assert folder.is_relative_to(tmp_path)
        assert folder.stat().st_mode & 0o777 == 0o700
    ada.chmod(0o777)
    assert compile_cache("ada") not in (ada, eve)
    base = tmp_path / f"trivet-compiled-{os.geteuid()}"
    assert ada.parent == eve.parent == base
    base.rename(tmp_path / "other")
    base.touch()
    assert compile_cache("ada").is_dir()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_confined_job_generates_and_builds_code(fleet: Fleet) -> None:
    """With the host's compiler, in its owner's cache: the first kernels take minutes on a busy machine."""
    fleet.beat()
    spec = CompileSpec.model_validate(
        {
            "model": train_spec("x").model.model_dump(),
            "modes": ["eager", "inductor"],
            "phases": ["inference"],
            "shapes": [8],
            "device": "cpu",
        }
    )
    job, _ = fleet.store.jobs.submit(spec, "tester")
    assert fleet.store.attempts.place() == [job.id]
    ref = AttemptRef(job.id, 1, HOST)
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    eventually(lambda: fleet.job(ref).ended_at, within_s=800)
    ended = fleet.job(ref)
    assert ended.state == "succeeded", ended.error
    assert ended.result is not None
    assert ended.result["gate"]["inference"] == "inductor", ended.result["summary"]
