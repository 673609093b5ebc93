"""An operator installs a package; its family, source and objective are listed, checked and trained like any other."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Service

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[1] / "plugins" / "example_package"
JOB = {
    "kind": "train",
    "model": {"family": "gated", "in_features": 2, "out_features": 3},
    "data": {"source": "rings", "rings": 3},
    "objective": "hinge",
    "optimizer": {"lr": 0.03},
    "steps": 40,
    "parallel": {"tp": 2},
}


def install(folder: Path) -> None:
    """The example, and a package whose module is not there."""
    source = folder.parent / "source"
    shutil.copytree(EXAMPLE, source)  # building leaves folders behind
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(folder), str(source)], check=True, capture_output=True)
    broken = folder / "halfway-0.1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: halfway\nVersion: 0.1\n")
    (broken / "entry_points.txt").write_text("[trivet.models]\nfancy = halfway.models:FAMILY\n")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose operator has installed them. (A helper of this folder's conftest starts it.)"""
    folder = tmp_path_factory.mktemp("plugins") / "packages"
    install(folder)
    location = importlib.util.spec_from_file_location("e2e_service", Path(__file__).parent / "conftest.py")
    assert location is not None
    assert location.loader is not None
    world = importlib.util.module_from_spec(location)
    sys.modules["e2e_service"] = world
    location.loader.exec_module(world)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    running = world.start(tmp_path_factory.mktemp("extended") / "data", PYTHONPATH=path)
    yield running
    world.stop(running)


def test_an_installed_package_is_listed_checked_and_trained(extended: Service) -> None:
    job_id = extended.submit(JOB)["id"]

    kinds = extended.http.get("/v1/kinds").json()
    for group, name in (
        ("families", "gated"),
        ("sources", "rings"),
        ("objectives", "hinge"),
        ("programs", "allocator"),
    ):
        (entry,) = (each for each in kinds[group] if each["name"] == name)
        assert (entry["distribution"], entry["version"]) == ("trivet-example", "1.2.3")
        assert entry["schema"]["additionalProperties"] is False
    assert [(each["name"], each["distribution"]) for each in kinds["unavailable"]] == [("fancy", "halfway")]
    assert "No module named 'halfway'" in kinds["unavailable"][0]["reason"]
    definitions = extended.http.get("/v1/kinds/train/schema").json()["$defs"]
    assert {"GatedConfig", "RingsData", "HingeObjective"} <= definitions.keys()

    refusals = {
        "model.inner": {"model": {**JOB["model"], "inner": 9}},
        "parallel.pp": {"parallel": {"pp": 3}, "batch": {"global": 60}},
        "model.out_features": {"data": {"source": "rings", "rings": 4}},
        "model.widht": {"model": {**JOB["model"], "widht": 8}},
        "model": {"model": {"family": "fancy"}},
    }
    for path, change in refusals.items():
        answer = extended.http.post("/v1/jobs", json={**JOB, **change})
        assert answer.status_code == 422
        assert [error["path"] for error in answer.json()["errors"]] == [path]
    assert "family 'fancy' of halfway 0.1 is installed but unavailable" in answer.json()["detail"]

    job = extended.wait(job_id)
    assert job["state"] == "succeeded", job
    assert job["result"]["eval_accuracy"] > 0.9
    assert job["result"]["eval_hinge"] < 0.2


def test_an_installed_program_is_compile_checked(extended: Service) -> None:
    check = {"kind": "compile", "program": {"name": "allocator", "rounds": 2}, "modes": ["eager"], "phases": ["train"]}
    job = extended.wait(extended.submit(check)["id"])
    assert job["state"] == "succeeded", job
    assert job["result"]["verdicts"] == {"pass": 1}
    answer = extended.http.post("/v1/jobs", json={**check, "parallel": {"dp_shard": 2}})
    assert [error["path"] for error in answer.json()["errors"]] == ["parallel"]
