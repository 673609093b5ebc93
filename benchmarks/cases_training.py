"""Runs the training cases of ``cases.py``: scripts, judged by their output, and inputs without a script."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from case_rows import ROOT, Ran, Row, python, rewritten, run_script, running, skipped
from chaos_service import Service
from training_judges import JUDGES

from trivet import Client, Refused

PART = "training"


def run(cases: Path, names: list[str], limit: float) -> Iterator[Row]:
    """Yield a row for each script and input of the folder ``training``, or for the named ones."""
    plugin = {"PYTHONPATH": str(cases / "training" / "T-plugin")}
    with tempfile.TemporaryDirectory() as scratch, running(plugin) as service:
        copy = Path(scratch) / "training"
        subprocess.run(["cp", "-rL", "--no-preserve=mode", str(cases / "training"), str(copy)], check=True)
        words = {'"TRIVET"': repr(str(ROOT)), "TRIVET/.venv": f"{ROOT}/.venv", "CASES": str(copy), "SCRATCH": scratch}
        for folder in copy.iterdir():
            if not folder.name.startswith("T"):  # newer scripts are told by their environment
                rewritten(folder, words)
        _tell_scripts(copy, service)
        for folder in sorted(path for path in copy.iterdir() if (path / "expected.txt").exists()):
            if not names or folder.name in names:
                yield from _of_folder(folder, service, limit)
        for path in sorted([*copy.glob("*.zip"), *copy.glob("*.npz")]):
            if not names or path.name in names:
                yield _of_input(path, service)
        _end_what_scripts_started(copy)


def _tell_scripts(copy: Path, service: Service) -> None:
    """Write the service's data that some scripts read."""
    assert service.process is not None
    told = copy / "training-service"
    told.mkdir()
    (told / "up.pid").write_text(str(service.process.pid))
    (told / "data.path").write_text(str(service.data))
    (told / "up.log").touch()


def _end_what_scripts_started(copy: Path) -> None:
    """End the service that a script has started in place of the one that it stopped."""
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(int((copy / "training-service" / "up.pid").read_text()))
        process.terminate()
        process.wait(60)


def _of_folder(folder: Path, service: Service, limit: float) -> Iterator[Row]:
    if (own := OWN.get(folder.name)) is not None:
        with service.client() as client:
            yield from own(folder, client, service)
        return
    scripts = sorted([*folder.glob("*.py"), *folder.glob("*.sh")])
    # Other scripts look at the jobs of those that run jobs.
    for script in sorted(scripts, key=lambda path: not path.stem.startswith("run")):
        if (reason := _cannot(folder, script)) is not None:
            yield skipped(PART, folder.name, reason, script.name)
            continue
        command = ["unshare", "-m", "bash", script.name] if script.suffix == ".sh" else python(script.name)
        # What the scripts of newer cases share lies beside them.
        told = {"PYTHONPATH": f"{folder.parent}/T-lib", "TRIVET": str(ROOT), "DATA": str(service.data)}
        told["SCRATCH"] = str(folder / "scratch")
        yield _judged(folder.name, script.name, run_script(command, folder, service, limit, told))


def _cannot(folder: Path, script: Path) -> str | None:
    """Return why a script cannot run here."""
    if folder.name.startswith("19-") and not (folder.parent / "plugins").exists():
        return "its data source, plugins/noisy, is not among the cases"
    if (
        script.suffix == ".sh"
        and subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode
    ):
        return "this user may make no mount namespace"
    return None


def _judged(case: str, script: str, ran: Ran) -> Row:
    judge = JUDGES.get((case, script))
    if ran.status is None:
        wrong = "its time ran out"
    elif judge is None:
        wrong = f"exit {ran.status}" if ran.status else ""
    else:
        wrong = judge(ran.output) or (f"exit {ran.status}: {ran.last}" if ran.status else "")
    said = "as expected" if not wrong else "otherwise"
    return Row(
        PART, case, script, "see expected.txt", said, "WRONG" if wrong else "right", ran.seconds, wrong or ran.last
    )


TRAINING: dict[str, Any] = {
    "kind": "train",
    "device": "cpu",
    "model": {"family": "transformer", "vocab_size": 256, "dim": 32, "layers": 2, "heads": 4, "max_sequence": 32},
    "data": {"source": "tokens", "sequence": 32},
    "batch": {"global": 8},
    "optimizer": {"lr": 0.01},
    "schedule": {"decay": "constant"},
}


def _continued(folder: Path, client: Client, service: Service) -> Iterator[Row]:
    """Train twelve steps, and six and six more on other layouts."""
    whole, first = (client.submit({**TRAINING, "name": f"{steps} steps", "steps": steps}) for steps in (12, 6))
    for job in (whole, first):
        client.wait(job.id)
    right = _losses(client, whole.id)
    for layout in ({}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2}):
        started = time.monotonic()
        resumed = {**TRAINING, "steps": 12, "parallel": layout, "resume": {"job": first.id, "step": "latest"}}
        job = client.wait(client.submit({**resumed, "name": f"resumed {layout}"}).id)
        found = [*_losses(client, first.id), *_losses(client, job.id)][-12:]
        apart = max((abs(a - b) for a, b in zip(found, right, strict=False)), default=1.0)
        is_right = job.state == "succeeded" and len(found) == 12 and apart < 1e-4
        detail = f"{len(found)} losses, {apart:.1g} from those of 12 steps"
        yield Row(
            PART,
            folder.name,
            str(layout),
            "the 12 losses",
            job.state,
            _word(is_right),
            time.monotonic() - started,
            detail,
        )


def _losses(client: Client, job: str) -> list[float]:
    return [float(each) for each in client.metrics(job)["loss"]["value"]]


def _word(is_right: bool) -> str:
    return "right" if is_right else "WRONG"


def _specs(folder: Path, client: Client, service: Service) -> Iterator[Row]:
    """Submit each file by the command: valid JSON is taken, and nothing ends in a traceback."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.yaml")]):
        try:
            json.loads(path.read_bytes())
            is_json = True
        except ValueError:
            is_json = False
        ran = run_script([sys.executable, "-m", "trivet", "submit", path.name], folder, service, 120)
        is_taken = ran.status == 0
        is_right = is_taken if is_json else "Traceback" not in ran.output
        expected = "accepted" if is_json else "accepted or refused"
        said = "accepted" if is_taken else "refused"
        yield Row(PART, folder.name, path.name, expected, said, _word(is_right), ran.seconds, ran.last)


def _artifacts(folder: Path, client: Client, service: Service) -> Iterator[Row]:
    """Download into a folder, through a link, into a pipe and to a device."""
    job = client.wait(client.submit({**TRAINING, "name": "artifacts", "steps": 1}).id)
    name = next(each.name for each in client.artifacts(job.id) if "/" not in each.name)
    (folder / "out").mkdir(exist_ok=True)
    for place in ("pipe", "link.txt"):
        (folder / place).unlink()
    os.mkfifo(folder / "pipe")
    (folder / "link.txt").symlink_to("kept.txt")
    reader = subprocess.Popen(["cat", "pipe"], cwd=folder, stdout=subprocess.PIPE)
    for target in (".", "out", "out/", "link.txt", "pipe", "/dev/null"):
        command = [sys.executable, "-m", "trivet", "artifacts", job.id, name, "-o", target]
        ran = run_script(command, folder, service, 120)
        is_right = ran.status == 0 and _landed(folder, target, name)
        yield Row(
            PART, folder.name, f"-o {target}", "written", f"exit {ran.status}", _word(is_right), ran.seconds, ran.last
        )
    reader.kill()


def _landed(folder: Path, target: str, name: str) -> bool:
    """Return whether a download is in the folder, and every link, pipe or device before is still none of its own."""
    if target == "/dev/null":
        return stat.S_ISCHR(Path(target).stat().st_mode)
    if target == "pipe":
        return stat.S_ISFIFO((folder / target).stat().st_mode)
    if target == "link.txt":
        return (folder / target).is_symlink() and (folder / "kept.txt").stat().st_size > 4
    return (folder / target / name).is_file()


OWN: Mapping[str, Callable[[Path, Client, Service], Iterator[Row]]] = {
    "10-continue-training": _continued,
    "20-json-specs": _specs,
    "21-artifact-into-a-folder": _artifacts,
}
RIGHT: Mapping[str, str] = {
    "plain": "succeeded",
    "window": "succeeded",
    "missing_shard": "refused",
    "head_dim": "refused",  # its configuration has other heads than its weights
    "qwen_bias": "refused",  # it has none of the biases that its type has
    "nonuntied": "refused or failed",  # only values of its tensors tell that it is not what it says
}
"""The permitted outcomes of an archive or an array; others may succeed or be refused."""


def _of_input(path: Path, service: Service) -> Row:
    """Train one step from an archive of weights or on arrays: it is refused, or succeeds, and hardly ever fails."""
    started, expected = time.monotonic(), RIGHT.get(path.stem, "succeeded or refused")
    with service.client() as client:
        try:
            job = client.wait(client.submit({**_spec_of(path, client), "name": path.name, "steps": 1}).id)
            said, detail = str(job.state), str(job.error or "")[:160]
        except Refused as error:
            said, detail = "refused", str(error).splitlines()[-1][:160]
    is_right = said in expected.split(" or ")
    return Row(PART, path.name, "", expected, said, _word(is_right), time.monotonic() - started, detail)


def _spec_of(path: Path, client: Client) -> dict[str, Any]:
    file = client.upload(path).id
    usual = {key: TRAINING[key] for key in ("kind", "device", "optimizer", "schedule")} | {"batch": {"global": 4}}
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            shape, classes = list(arrays["inputs"].shape[1:]), int(arrays["targets"].max()) + 1
        data = {"source": "file", "format": "arrays", "file": file, "shape": shape, "classes": classes}
        features = int(np.prod(shape))
        return usual | {
            "model": {"family": "mlp", "in_features": features, "hidden": [4], "out_features": classes},
            "data": data,
        }
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.split("/")[-1] == "config.json"]
        vocabulary = int(json.loads(archive.read(name))["vocab_size"])
    tokens = path.with_suffix(".bin")
    np.random.default_rng(0).integers(0, vocabulary, 8 * 16 + 1).astype("<u2").tofile(tokens)
    data = {"source": "file", "format": "tokens", "file": client.upload(tokens).id, "encoding": "uint16"}
    return usual | {"model": {"huggingface": file}, "data": data | {"sequence": 16, "vocabulary": vocabulary}}
