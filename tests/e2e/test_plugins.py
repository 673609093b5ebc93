"""An operator installs a package: what it brings is listed, checked and run like any other, a kind of job too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ensure_chromium import find_chromium
from playwright.sync_api import expect, sync_playwright
from running_service import Service, start, stop

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[1] / "plugins" / "example_package"
JOB = {
    "kind": "train",
    "model": {"family": "gated", "in_features": 2, "out_features": 3},
    "data": {"source": "rings", "rings": 3},
    "objective": "hinge",
    "optimizer": {"name": "signum", "lr": 0.03},
    "schedule": {"decay": "triangle", "period": 80},
    "steps": 40,
    "parallel": {"tp": 2},
}


ESTIMATE = {"kind": "estimate", "points": 64_000, "parallel": {"dp_shard": 2}}


STUCK = """
from typing import Literal
from service.jobs.plugins import ProgramConfig, ProgramKind

class Stuck(ProgramConfig):
    name: Literal["stuck"] = "stuck"

PROGRAM = ProgramKind(Stuck, "waiting:Waiting")
"""
WAITING = """
import time
import torch
from service.models.program import Parts, Step

class Waiting:
    period = 1

    def __init__(self, config, site):
        self.device = site.device

    def build(self, dtype):
        return Parts({"lone": torch.nn.Linear(2, 2, dtype=dtype)}, ("lone",))

    def train(self, parts, boundary):
        while True:
            boundary.step_boundary()
            yield Step({"loss": parts.modules["lone"].weight.sum().detach()})
            time.sleep(3600)  # for ever
"""


def install(folder: Path) -> None:
    """The example, a program that hangs in its second step, and a package whose module is not there."""
    source = folder.parent / "source"
    shutil.copytree(EXAMPLE, source)  # building leaves folders behind
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(folder), str(source)], check=True, capture_output=True)
    (folder / "stuck.py").write_text(STUCK)
    (folder / "waiting.py").write_text(WAITING)
    hanging = folder / "stuck-0.1.dist-info"
    hanging.mkdir()
    (hanging / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 0.1\n")
    (hanging / "entry_points.txt").write_text("[trivet.programs]\nstuck = stuck:PROGRAM\n")
    broken = folder / "halfway-0.1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: halfway\nVersion: 0.1\n")
    (broken / "entry_points.txt").write_text(
        "[trivet.models]\nfancy = halfway.models:FAMILY\n[trivet.kinds]\nghost = halfway.kinds:KIND\n"
    )


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose operator has installed them."""
    folder = tmp_path_factory.mktemp("plugins") / "packages"
    install(folder)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    running = start(tmp_path_factory.mktemp("extended") / "data", PYTHONPATH=path)
    yield running
    stop(running)


@pytest.fixture(scope="module")
def estimated(extended: Service, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job of the installed kind, once it has succeeded."""
    job = extended.wait(submit_from_a_file(extended, tmp_path_factory.mktemp("spec")))
    assert job["state"] == "succeeded", job
    return job


def test_an_installed_package_is_listed_checked_and_trained(extended: Service) -> None:
    job_id = extended.submit(JOB)["id"]

    kinds = extended.http.get("/v1/kinds").json()
    for group, name in (
        ("families", "gated"),
        ("sources", "rings"),
        ("objectives", "hinge"),
        ("optimizers", "signum"),
        ("schedules", "triangle"),
        ("programs", "allocator"),
    ):
        (entry,) = (each for each in kinds[group] if each["name"] == name)
        assert (entry["distribution"], entry["version"]) == ("trivet-example", "1.2.3")
        assert entry["schema"]["additionalProperties"] is False
    assert [(each["name"], each["distribution"]) for each in kinds["unavailable"]] == [
        ("fancy", "halfway"),
        ("ghost", "halfway"),
    ]
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


def test_an_installed_program_is_compile_checked_and_trained_as_its_gate_allows(extended: Service) -> None:
    program = {"name": "allocator", "rounds": 2}
    check = {"kind": "compile", "program": program, "modes": ["eager", "aot_eager"]}
    checked = extended.wait(extended.submit(check)["id"])
    assert checked["state"] == "succeeded", checked
    assert checked["result"]["verdicts"] == {"pass": 4}

    gated = {"train": True, "inference": True, "gate": checked["id"]}
    training = {"kind": "train", "program": program, "steps": 6, "evaluate": {"every": 3}, "compile": gated}
    refusals: dict[str, dict[str, Any]] = {
        "parallel": {**check, "parallel": {"dp_shard": 2}},
        "program.name": {**training, "program": {"name": "alocator"}},
        "program.rounds": {**training, "program": {**program, "rounds": 3}},
        "optimizer": {**training, "optimizer": {"lr": 0.1}},
        "compile.gate": {**JOB, "objective": "cross_entropy", "parallel": {}, "compile": gated},
    }
    for path, refused in refusals.items():
        answer = extended.http.post("/v1/jobs", json=refused)
        assert [error["path"] for error in answer.json()["errors"]] == [path], answer.json()
        if path == "program.name":
            assert "'alocator' is not known; did you mean 'allocator'?" in answer.json()["detail"]

    trained = extended.wait(extended.submit(training)["id"])
    assert trained["state"] == "succeeded", trained
    assert trained["result"]["compiled"] == {"train": "aot_eager", "inference": "aot_eager"}
    assert trained["result"]["eager"] == {}
    series = extended.http.get(f"/v1/jobs/{trained['id']}/metrics").json()["series"]
    assert series["loss"]["step"] == list(range(1, 7))
    assert series["eval_error"]["value"][-1] == trained["result"]["eval_error"]

    more = {**training, "steps": 8, "resume": {"job": trained["id"]}}
    resumed = extended.wait(extended.submit(more)["id"])
    assert (resumed["state"], resumed["result"]["steps"]) == ("succeeded", 8), resumed
    own = extended.http.get(f"/v1/jobs/{resumed['id']}/metrics").json()["series"]
    assert own["loss"]["step"] == [7, 8]
    answer = extended.http.post("/v1/jobs", json={**JOB, "model": {"job": trained["id"]}})
    assert "trains a program, which is no model" in answer.json()["detail"]

    using = {"kind": "run", "program": program, "weights": {"job": resumed["id"]}, "steps": 4}
    answer = extended.http.post("/v1/jobs", json={**using, "compile": {"train": True, "gate": checked["id"]}})
    assert [error["path"] for error in answer.json()["errors"]] == ["compile.train"]
    used = extended.wait(extended.submit({**using, "compile": {"inference": True, "gate": checked["id"]}})["id"])
    assert used["state"] == "succeeded", used
    assert (used["result"]["steps"], used["result"]["eager"]) == (4, {})
    listed = extended.http.get(f"/v1/jobs/{used['id']}/artifacts").json()["items"]
    assert "outputs/0-0.safetensors" in str(listed) or "outputs" in [each["name"] for each in listed]


def test_a_program_that_hangs_ends_with_the_line_at_which_it_stands(extended: Service) -> None:
    job = extended.wait(extended.submit({"kind": "train", "program": "stuck", "steps": 3, "stall_s": 30})["id"])
    assert job["state"] == "failed"
    assert "train (waiting.py:19)" in job["error"]["message"], job["error"]


def test_an_installed_kind_is_listed_checked_and_run(extended: Service, estimated: dict[str, Any]) -> None:
    (entry,) = (each for each in extended.http.get("/v1/kinds").json()["items"] if each["kind"] == "estimate")
    assert (entry["distribution"], entry["version"]) == ("trivet-example", "1.2.3")
    assert "rounds" in extended.http.get("/v1/kinds/estimate/schema").json()["properties"]
    document = extended.http.get("/openapi.json").json()["components"]["schemas"]
    assert "EstimateSpec" in document
    kinds = ["train", "verify", "compile", "chain", "run", "script", "estimate"]
    assert document["Job"]["properties"]["kind"]["enum"] == kinds

    for path, change in {
        "points": {"points": 64_001},
        "parallel": {"parallel": {"dp_shard": 64}},
        "rouns": {"rouns": 4},
    }.items():
        answer = extended.http.post("/v1/jobs", json={**ESTIMATE, **change})
        assert answer.status_code == 422
        assert [error["path"] for error in answer.json()["errors"]] == [path]

    submitted = estimated["id"]
    assert (estimated["kind"], estimated["name"]) == ("estimate", "estimate")
    assert abs(estimated["result"]["estimate"] - 3.14159) < 0.05
    assert extended.http.get(f"/v1/jobs/{submitted}/report").json().keys() == {"estimate", "inside"}
    series = extended.http.get(f"/v1/jobs/{submitted}/metrics").json()["series"]
    assert series["estimate"]["step"] == list(range(1, 9))
    listed = extended.http.get("/v1/jobs", params={"kind": "estimate"}).json()["items"]
    assert [each["id"] for each in listed] == [submitted]


def submit_from_a_file(service: Service, folder: Path) -> str:
    """Submit by a command that runs where the package is not installed."""
    spec = folder / "estimate.yaml"
    spec.write_text(yaml.safe_dump(ESTIMATE))
    settings = {"TRIVET_URL": service.url, "TRIVET_KEY": (service.data / "admin.key").read_text().strip()}
    command = [sys.executable, "-m", "trivet", "submit", str(spec)]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_kind_that_cannot_be_used_is_named_at_the_start_and_at_submission(extended: Service) -> None:
    started = (extended.data.parent / "up.log").read_text()
    assert "trivet.kinds 'ghost' of halfway is unavailable: ModuleNotFoundError: No module named 'halfway'" in started
    answer = extended.http.post("/v1/jobs", json={"kind": "ghost"})
    assert answer.status_code == 422
    assert "kind 'ghost' of halfway 0.1 is installed but unavailable" in answer.json()["detail"]


def test_the_page_of_an_installed_kind_has_its_own_section(extended: Service, estimated: dict[str, Any]) -> None:
    """In a browser of its own: beside the others that drive one, it would need a service of its own."""
    if (chromium := find_chromium()) is None:
        pytest.skip("no Chromium is installed; tests/ensure_chromium.py can install one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(base_url=extended.url)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"/login?next=/jobs/{estimated['id']}")
        page.locator("input[type=password]").fill((extended.data / "admin.key").read_text().strip())
        page.get_by_role("button", name="Sign in").click()
        estimate = page.get_by_label("Estimate of π")
        expect(estimate).to_contain_text(f"π is about {estimated['result']['estimate']:.4f}.")
        page.goto("/")
        expect(page.get_by_label("Kind").locator("option")).to_have_text(
            ["All kinds", "train", "verify", "compile", "chain", "run", "script", "estimate"]
        )
        browser.close()
    assert complaints == []
