"""``trivet doctor`` on this machine and on broken ones, and the specs that ``trivet init`` writes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from cli_world import Cli
from pydantic import SecretStr

from service.jobs.kinds.registry import spec_adapter
from service.jobs.settings import Settings
from service.torch_internals.installed import InstalledTorch
from trivet import doctor
from trivet.cli.first_spec import first_spec
from trivet.cli.machine import KINDS


@pytest.mark.slow
def test_a_healthy_machine_has_nothing_wrong(trivet: Cli, broker: str) -> None:
    ran = trivet("doctor", "--json", TRIVET_PORT="0", TRIVET_REDIS_URL=broker)
    found = {each["subject"]: each for each in ran.json["findings"]}
    assert {"packages", "torch", "GPUs", "isolation", "data folder", "broker", "service"} <= found.keys()
    assert not [each for each in found.values() if each["status"] == "wrong"]
    assert ran.code == 0
    assert found["service"]["told"] == f"ready at {trivet.variables['TRIVET_URL']}, 0 worker hosts"


def test_an_overcommitted_processor_is_told_with_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os\nfor _ in range(3): os.fork()\nprint(flush=True)\nwhile True: pass"  # more than others run here
    )
    environment = {**os.environ, "TRIVET_JOB": "job_busy"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as busy:
        try:
            assert busy.stdout is not None
            for _ in range(8):
                busy.stdout.readline()
            monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 1.0, 1.0))
            (idle,) = doctor.processor(Settings())
            monkeypatch.setattr(os, "getloadavg", lambda: (4096.0, 1.0, 1.0))
            (found,) = doctor.processor(Settings())
        finally:
            os.killpg(busy.pid, signal.SIGKILL)
    assert idle.status == "ok"
    assert found.status == "warning"
    assert f"4096 threads on average compete for its {os.cpu_count()} cores; now " in found.told
    assert re.search(r"job_busy \d", found.told)


def test_what_is_wrong_is_told_with_what_to_do(trivet: Cli, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        ran = trivet(
            "doctor", TRIVET_PORT=str(port), TRIVET_REDIS_URL=f"unix://{tmp_path}/none.sock", TRIVET_URL=None,
            TRIVET_KEY=None, TRIVET_DATA=str(tmp_path / "data"),
        )  # fmt: skip
    assert ran.code == 1
    text = " ".join(ran.out.split())
    assert "wrong broker: TRIVET_REDIS_URL does not answer" in text
    assert f"wrong port: 127.0.0.1:{port} cannot be bound" in text
    assert "start one with: trivet up" in text


def test_requirements_are_compared_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["no-such-package>=1", "pyyaml>=999", "rich>=1", "absent-extra>=1; extra == 'dev'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: asked)
    (finding,) = doctor.packages(Settings())
    assert finding.status == "wrong"
    assert re.fullmatch(r"no-such-package is not installed; pyyaml is [\d.]+; expected >=999", finding.told)


def test_a_trivet_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "requires", missing)
    (finding,) = doctor.packages(Settings())
    assert (finding.status, "is not installed" in finding.told) == ("warning", True)


def test_the_embedded_broker_is_tried_where_no_other_is_named() -> None:
    assert [each.status for each in doctor.broker(Settings(redis_url=None))] == ["ok"]
    (finding,) = doctor.broker(Settings(redis_url=SecretStr("unix:///nowhere/broker.sock")))
    assert finding.status == "wrong"


def test_the_torch_that_is_installed_is_told_with_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = {"version": "2.99.0+cpu", "built_for": None, "devices": [], "gloo": True, "nccl": None}
    ran = CompletedProcess[str]([], 0, json.dumps(imported), "")
    monkeypatch.setattr(doctor, "_run", lambda *_: ran)
    monkeypatch.setattr(doctor, "installed_torch", lambda: InstalledTorch("2.99.0+cpu", None))
    monkeypatch.setattr(doctor, "_gpus_of_the_driver", lambda: ["GPU 0"])
    found = list(doctor._torch_and_devices(Settings()))
    assert [(each.subject, each.status) for each in found] == [
        ("torch", "ok"), ("torch", "warning"), ("torch", "warning"), ("GPUs", "wrong")
    ]  # fmt: skip
    assert found[0].told == "2.99.0+cpu, built for the CPU, not tried with this Trivet"


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_spec_is_accepted_as_it_is_and_with_every_comment_set(kind: str) -> None:
    text = first_spec(kind)
    spec = spec_adapter.validate_python(yaml.safe_load(text))
    head, _, further = text.partition("\n# Further fields")
    fields = re.sub(r"^# ", "", further.partition("\n")[2], flags=re.MULTILINE)
    assert fields.count(":") > 5
    assert spec_adapter.validate_python(yaml.safe_load(head + "\n" + fields)) == spec


def test_init_writes_the_spec_to_a_pipe(trivet: Cli) -> None:
    piped = trivet.ok("init", "verify")
    assert piped.out == first_spec("verify")
    assert "trivet submit FILE --set model.job=ID" in piped.err
    assert list(trivet.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("verify", "#     LIB query; one of ibp, crown-ibp, crown, alpha-crown, beta-crown"),
        ("verify", "#     onnx: the id of an uploaded ONNX file"),
        ("verify", "#       lower: the least value of each input"),
        ("verify", "# #   batch: instances bounded together"),
        ("train", "#   {family: mlp, in_features, hidden, out_features, activation}: A fully connected classifier:"),
        ("compile", "# #     file: the id of an uploaded export"),
    ],
)
def test_a_first_spec_says_what_each_field_may_be(kind: str, line: str) -> None:
    said = " ".join(first_spec(kind).replace("#", " ").split())
    assert " ".join(line.removeprefix("#     LIB query; ").replace("#", " ").split()) in said


def test_init_writes_a_file_and_never_over_one(trivet: Cli) -> None:
    trivet.ok("init", "train", "train.yaml")
    written = trivet.folder / "train.yaml"
    assert written.read_text() == first_spec("train")
    written.write_text("mine")
    assert "--force" in trivet("init", "train", "train.yaml").err
    assert written.read_text() == "mine"
    trivet.ok("init", "train", "train.yaml", "--force")
    trivet.ok("init", "verify", "-o", "other.yaml")
    assert "trivet submit third.yaml --set model.job=ID" in trivet.ok("init", "compile", "third.yaml").out
    assert "trivet submit script.yaml --set archive=@FOLDER" in trivet.ok("init", "script", "-o", "script.yaml").out
    assert "expected train, verify, compile" in trivet("init", "nothing").err
