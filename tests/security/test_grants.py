"""What ranks get is what the submission was checked for: typed fields of the spec, not text that looks like an id."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from onnx_models import dense
from pydantic import ValidationError
from worker_fleet import Fleet, train_spec

from service.jobs.records import Claim, Rejected
from service.jobs.spec.verify import VerifySpec
from service.jobs.store.files import UploadedBy
from workers.supervisor.job_policy import JobPolicy


def uploaded(fleet: Fleet, project: str, content: bytes) -> str:
    return fleet.store.files.add([content], "text/plain", uploader=UploadedBy(project, "ann")).id


def claimed(fleet: Fleet, spec: VerifySpec) -> Claim:
    ref = fleet.place(spec)
    return fleet.store.attempts.claim(ref, "supervisor")


def granted(fleet: Fleet, claim: Claim) -> set[str]:
    confined = JobPolicy("auto").confine(claim, fleet.data, "redis://127.0.0.1", read=[], write=[])
    return {path for path in confined.read if Path(path).is_relative_to(fleet.data.files)}


def verify_spec(onnx: str, **fields: object) -> VerifySpec:
    box = {"box": {"lower": [0], "upper": [1]}}
    return VerifySpec.model_validate({"model": {"onnx": onnx}, "property": box, "device": "cpu", **fields})


def test_ranks_read_the_uploads_that_fields_name_and_none_that_other_text_names(fleet: Fleet) -> None:
    fleet.store.projects.create("blue", "")
    own, secret = uploaded(fleet, "default", dense((1, 1))), uploaded(fleet, "blue", b"secret")
    claim = claimed(fleet, verify_spec(own, name=secret, labels={"x": f"see {secret}", "y": secret}))
    assert granted(fleet, claim) == {str(fleet.data.file(own))}
    with pytest.raises(Rejected, match="there is no"):
        fleet.store.jobs.submit(verify_spec(secret), "ann")


def test_a_host_of_another_version_grants_nothing_that_a_submission_did_not_name(fleet: Fleet) -> None:
    """Its spec's class may find more jobs in the same fields than were checked."""
    ref = fleet.submit("trained")
    claim = fleet.store.attempts.claim(ref, "supervisor")
    widened = dataclasses.replace(claim, spec=train_spec("x", model={"job": "job_" + "0" * 20}))
    assert widened.sources == ()


def test_a_label_that_looks_like_an_upload_of_the_record_is_only_a_label(fleet: Fleet) -> None:
    label = '"file:blue/' + "f" * 64 + '"'
    job, _ = fleet.store.jobs.submit(train_spec("x", labels={"x": label}), "ann")
    fleet.store.jobs.cancel(job.id)
    assert fleet.store.jobs.retry(job.id).state == "queued"


@pytest.mark.parametrize(
    "place", ["s3://bucket/x", "memory://x", "simplecache::s3://b/x", "file:///etc/passwd", "../x"]
)
def test_a_spec_names_uploads_by_their_ids_and_no_place_of_a_file_or_an_object_store(place: str) -> None:
    with pytest.raises(ValidationError, match=r"onnx\n"):
        verify_spec(place)
    mlp = {"family": "mlp", "in_features": 64, "hidden": [64], "out_features": 10}
    for changes in (
        {"model": {"safetensors": place, **mlp}},
        {"model": {"huggingface": place}},
        {"data": {"source": "file", "format": "tokens", "file": place}},
        {"data": {"source": "file", "format": "arrays", "file": place, "axes": ["C"], "classes": 2}},
    ):
        with pytest.raises(ValidationError, match="id_expected"):
            train_spec("x", **changes)
