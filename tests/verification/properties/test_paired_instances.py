"""One job about many models: rows of ``instances.csv``, each with a model, a query and its time."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lanes import slow_but_for
from onnx_jobs import BOX, DECLARED, NETWORK, reach, upload
from onnx_models import dense, model, node
from pydantic import ValidationError
from verify_jobs import Recorder, context

from service.bounds.graph import UnsupportedModelError
from service.formats.vnnlib import VnnlibError, bundle
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VerifySpec
from service.verification import job
from service.verification.failures import RowsFailedError
from service.verification.load import load_onnx
from service.verification.properties import PropertyError

ONE = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= X_0 1))(assert (>= X_0 0))(assert (>= Y_0 99))"


def query(share: float) -> str:
    least, most = reach()
    return f"{DECLARED}{BOX}(assert (>= Y_0 {most + share * (most - least)}))"


FILES: dict[str, bytes] = {
    "bench/onnx/three.onnx": NETWORK,
    "bench/onnx/one.onnx.gz": gzip.compress(dense([1, 4, 1])),
    "bench/far.vnnlib": query(9).encode(),
    "bench/reached.vnnlib.gz": gzip.compress(query(-0.2).encode()),
    "bench/one.vnnlib": ONE.encode(),
    "bench/README.md": b"no part of it",
}
ROWS = "./onnx/three.onnx,far.vnnlib,10\nonnx/one.onnx,one.vnnlib\n\nonnx/three.onnx,reached.vnnlib,7.5\n"


def archive(rows: str = ROWS, **more: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as written:
        for name, content in {**FILES, **more, "bench/instances.csv": rows.encode()}.items():
            written.writestr(name, content)
    return made.getvalue()


def specification(data: DataLayout, content: bytes, **fields: Any) -> VerifySpec:
    return VerifySpec.model_validate({"device": "cpu", "property": {"instances": upload(data, content)}, **fields})


def run(data: DataLayout, content: bytes, **fields: Any) -> tuple[dict[str, Any] | None, Recorder]:
    ranked, report = context(data)
    return job.run(specification(data, content, **fields), ranked), report


@pytest.mark.parametrize("rigorous", slow_but_for([False, True], False))
def test_every_row_is_an_instance_with_the_name_that_the_file_gives_it(data: DataLayout, rigorous: bool) -> None:
    """Models one after the other, of different sizes."""
    result, report = run(data, archive(), rigorous=rigorous)
    assert result is not None
    assert [(row["instance"], row["name"], row["verdict"]) for row in report.bounds] == [
        (0, "onnx/three.onnx far.vnnlib", "verified"),
        (2, "onnx/three.onnx reached.vnnlib", "falsified"),
        (1, "onnx/one.onnx one.vnnlib", "verified"),
    ]
    assert [step[0] for step in report.steps] == [1, 2, 3]
    assert result["instances"] == 3
    assert {line["layer"].split(":")[0] for line in result["layers"]} == {"onnx/three.onnx", "onnx/one.onnx"}
    assert [len(row["lower"]) for row in report.bounds] == [2, 2, 1]


@pytest.mark.slow
def test_a_row_has_seconds_of_its_own(data: DataLayout) -> None:
    rows = "onnx/three.onnx,near.vnnlib,0.000001\nonnx/one.onnx,one.vnnlib\n"
    near = {"bench/near.vnnlib": query(0.03).encode()}
    _, report = run(data, archive(rows, **near), method="ibp", budget={"restarts": 0, "seconds": 30})
    assert [row["verdict"] for row in report.bounds] == ["timeout", "verified"]


@pytest.mark.slow
def test_what_an_attempt_decided_is_not_done_again(data: DataLayout) -> None:
    told: list[Any] = []
    ranked, first = context(data, should_stop=lambda: len(told) > 0, job_id="job_" + "p" * 20)
    told = first.bounds
    job.run(specification(data, archive(), budget={"batch": 1}), ranked)
    again, second = context(data, job_id="job_" + "p" * 20, attempt=2)
    result = job.run(specification(data, archive(), budget={"batch": 1}), again)
    assert result is not None
    assert 0 < len(first.bounds) < 3
    assert second.bounds[: len(first.bounds)] == first.bounds
    assert sorted(row["instance"] for row in second.bounds) == [0, 1, 2]


@pytest.mark.slow
def test_a_model_that_cannot_be_bounded_is_named_and_the_others_are_done(data: DataLayout) -> None:
    odd = model([node("Det", ["x"], "y")], [1, 2, 2], {}, opset=17)
    ranked, report = context(data)
    rows = "odd.onnx,far.vnnlib\nonnx/three.onnx,far.vnnlib\n"
    result = job.run(specification(data, archive(rows, **{"bench/odd.onnx": odd})), ranked)
    assert result is not None
    refused, bounded = sorted(report.bounds, key=lambda row: row["instance"])
    assert (refused["verdict"], refused["lower"], refused["margin"]) == ("unknown", [], None)
    assert refused["reason"].startswith("odd.onnx: no rule for ONNX Det")
    assert bounded["reason"] is None
    assert result["verdicts"]["unknown"] == 1
    assert result["instances"] == 2


def test_no_model_that_can_be_bounded_ends_the_job(data: DataLayout) -> None:
    odd = model([node("Det", ["x"], "y")], [1, 2, 2], {}, opset=17)
    ranked, report = context(data)
    with pytest.raises(UnsupportedModelError, match=r"^odd\.onnx: no rule for ONNX Det"):
        job.run(specification(data, archive("odd.onnx,far.vnnlib\n", **{"bench/odd.onnx": odd})), ranked)
    assert not report.bounds


def test_a_query_about_another_model_is_refused(data: DataLayout) -> None:
    with pytest.raises(PropertyError, match=r"onnx/one\.onnx far\.vnnlib has 3 inputs and 2 outputs, the model has 1"):
        run(data, archive("onnx/one.onnx,far.vnnlib\n"))


def read_all(path: Path) -> list[bytes | None]:
    with bundle(path) as opened:
        return [opened.model(pair) for pair in opened.pairs]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "^instances.csv has 0 rows"),
        ("onnx/three.onnx\n", "line 1: got 'onnx/three.onnx', expected MODEL,QUERY"),
        ("a,b,c,d\n", "expected MODEL,QUERY"),
        ("onnx/three.onnx,far.vnnlib,soon\n", "got 'soon', expected seconds above 0"),
        ("onnx/three.onnx,far.vnnlib,nan\n", "expected seconds above 0"),
        ("\nonnx/four.onnx,far.vnnlib\n", r"line 2: the archive has no onnx/four.onnx, and no onnx/four.onnx.gz"),
        ("../three.onnx,far.vnnlib\n", "the archive has no ../three.onnx"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path, rows: str, words: str) -> None:
    path = tmp_path / "given.zip"
    path.write_bytes(archive(rows))
    with pytest.raises(VnnlibError, match=words):
        read_all(path)


def test_an_archive_without_a_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "given.zip"
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("three.onnx", NETWORK)
    with pytest.raises(VnnlibError, match=r"1 files has no instances\.csv"), bundle(path):
        pass


def test_models_are_given_once(data: DataLayout) -> None:
    onnx = {"onnx": upload(data, NETWORK)}
    with pytest.raises(ValidationError, match=r"the models of property\.instances are in its archive"):
        specification(data, archive(), model=onnx)
    with pytest.raises(ValidationError, match="model: none is given"):
        VerifySpec.model_validate({"property": {"vnnlib": upload(data, query(1).encode())}})
    assert np.isfinite(reach()).all()


def test_a_fault_of_the_service_fails_its_own_row_alone(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a search, and in loading a model: all other rows are decided and kept before the job fails."""

    def decided_but_once(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        raise IndexError("out of range")

    monkeypatch.setattr("service.verification.search_runner.decide", decided_but_once)
    searched = archive(
        "onnx/three.onnx,near.vnnlib\nonnx/three.onnx,far.vnnlib\n", **{"bench/near.vnnlib": query(0.02).encode()}
    )
    ranked, report = context(data)
    with pytest.raises(RowsFailedError, match=r"1 of 2 instances .*: 0; .* IndexError: out of range"):
        job.run(specification(data, searched), ranked)
    assert [(row["instance"], row["verdict"]) for row in report.bounds] == [(1, "verified")]
    assert list(ranked.paths.artifacts.glob("*.parquet"))

    monkeypatch.setattr("service.verification.load.load_onnx", _failing_for(1))
    ranked, report = context(data)
    with pytest.raises(RowsFailedError, match=r"1 of 2 instances .*: 1; .* KeyError"):
        job.run(specification(data, archive("onnx/three.onnx,far.vnnlib\nonnx/one.onnx,one.vnnlib\n")), ranked)
    assert [(row["instance"], row["verdict"]) for row in report.bounds] == [(0, "verified")]


def _failing_for(instance: int) -> Callable[..., Any]:
    def load(*arguments: Any) -> Any:
        if instance in arguments[-1]:
            raise KeyError("weights")
        return load_onnx(*arguments)

    return load
