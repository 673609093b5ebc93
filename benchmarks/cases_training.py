"""Runs the training cases of ``cases.py``: scripts, judged by their output, and inputs without a script."""

from __future__ import annotations

import json
import os
import re
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

from trivet import Client, Refused

PART = "training"
Judge = Callable[[str], str]
"""Return the fault of an output, or nothing."""


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


def _numbers(line: str) -> list[float]:
    return [float(each) for each in re.findall(r"'(-?[\d.]+)'", line)]


def tied(output: str) -> str:
    """Losses and norms on each layout, and exports, are those of one table."""
    found = [_numbers(line) for line in output.splitlines() if line.strip().startswith("trivet")]
    right = [_numbers(line) for line in output.splitlines() if line.strip().startswith("tied ref")]
    if len(found) != 3:
        return f"{len(found)} of 3 layouts trained: {output[-160:]}"
    apart = max(abs(a - b) for one, other in zip(found, right, strict=True) for a, b in zip(one, other, strict=True))
    exported = output.count("tie_word_embeddings True")
    return "" if apart < 2e-3 and exported == 3 else f"{apart:.2g} from the reference, {exported} of 3 exports tied"


def never_failed(output: str) -> str:
    """Accepted jobs succeed."""
    failed = [line for line in output.splitlines() if re.match(r".{24} failed ", line)]
    return failed[0][:160] if failed else ""


def finite(output: str) -> str:
    """No checkpoint has broken weights, nothing ends in torch's words, and no NaN in *succeeded*."""
    broken = re.search(r"non-finite entries: [1-9]", output)
    words = "cannot be converted to type" in output
    silent = re.search(r"--- [ad]: [^:]*: succeeded", output) or re.search(
        r"succeeded .*'eval_loss': (None|nan)", output
    )
    return " and ".join(
        text
        for is_so, text in ((broken, "broken weights kept"), (words, "torch's words"), (silent, "succeeded with NaN"))
        if is_so
    )


def advice(output: str) -> str:
    """A checkpoint of the failed job can be named, and a retry with changes is refused or done."""
    jobs = re.findall(r"(?:lower rate|naming the step): job_", output)
    retried = re.search(r"retry with another rate: (\d+) -> spec lr (\S+)", output)
    ignored = retried is not None and retried[1] == "202" and float(retried[2]) != 1e-5
    return "the change was ignored" if ignored else "" if len(jobs) == 2 else f"{len(jobs)} of 2 jobs were accepted"


def cancelled(output: str) -> str:
    """Every job is cancelled, without a rank or a zombie left."""
    lines = [line for line in output.splitlines() if "; had " in line]
    if len(lines) != 4:
        return f"{len(lines)} of 4 jobs: {output[-160:]}"
    wrong = [line for line in lines if " cancelled in " not in line or "True)" in line or "zombies []" not in line]
    return wrong[0][:160] if wrong else ""


def evaluated(output: str) -> str:
    """The steps of evaluations after a kill are those without one."""
    lines = re.findall(r"events (\[[\d, ]*\]) parquet (\[[\d, ]*\])", output)
    right = [("[20, 40, 60, 80]",) * 2] * 2 + [("[20, 40]",) * 2]
    return "" if lines == right else f"{lines}"


def none_missing(output: str) -> str:
    return "" if "missing in events [] in parquet []" in output else output.strip()[-160:]


def found_by_name(output: str) -> str:
    lines = [line for line in output.splitlines() if " stored " in line]
    wrong = [line for line in lines if "False" in line]
    return wrong[0] if wrong else "" if lines else "no job was stored"


def full_disk(output: str) -> str:
    """The job fails because of the full disk, and continues when there is room."""
    before, _, after = output.partition("upload while full:")
    failed = re.search(r"failed .*(full|[Nn]o space)", before)
    return "" if failed and re.search(r"^\d+ succeeded", after, re.MULTILINE) else output.strip()[-160:]


def pictures(output: str) -> str:
    """Pictures are learned from as they are, or refused with both shapes."""
    stored, *others = output.splitlines()[-3:]
    first, *_, right = (each.split(" .. ")[0] for each in re.findall(r"[\d.]+ \.\. [\d.]+", stored)[:2])
    if abs(float(first) - float(right)) > 1e-5:
        return stored
    silent = [line for line in others if not re.search(r"(refused|failed) .*\(3, 6, 8\)|\(40, 6, 8, 3\)", line)]
    return silent[0] if silent else ""


def rotary(output: str) -> str:
    """A first loss is that of the right original length; what the transformer has not is refused."""
    right = [4.9864874, 4.9674027, 4.9864874, 4.9864874]
    lines = [line for line in output.splitlines() if " -> " in line]
    losses = [float(line.split("loss ")[1]) for line in lines[:4] if "loss " in line]
    if len(losses) < 4 or max(abs(one - other) for one, other in zip(losses, right, strict=True)) > 1e-5:
        return " ".join(lines[:4])[:160]
    return next((line[:160] for line in lines[4:] if "refused" not in line), "")


def repeated(output: str) -> str:
    """Equal runs are equal, resumed or not, with recomputation or without."""
    wrong = [line for line in output.splitlines() if "same: False" in line or "DIFFER" in line or " failed" in line]
    apart = [line for line in output.splitlines() if "max diff" in line and not line.endswith(" 0.0")]
    return (wrong + apart + [""])[0].strip() if "EQUAL" in output else output[-160:]


def counted(output: str) -> str:
    """Of each subject, every layout has the same losses, within those of float32, or is refused by the label."""
    lines = [line for line in output.splitlines() if line.startswith(("classes", "tokens ignored"))]
    for subject in ("classes", "tokens"):
        found = [[float(each) for each in re.findall(r"\d\.\d+", line)] for line in lines if line.startswith(subject)]
        if any("failed" in line and "-100" not in line for line in lines):
            return next(line for line in lines if "failed" in line)[:160]
        if any(abs(a - b) > 1e-5 for one in found for a, b in zip(one, found[0], strict=True)):
            return f"{subject}: {[each[0] for each in found]}"
    return ""


def ignored(output: str) -> str:
    losses = [float(each) for each in re.findall(r"succeeded \[([\d.]+)\]", output)]
    return "" if len(losses) == 2 and max(abs(each - 5.528141) for each in losses) < 1e-4 else output[-160:]


def weights(output: str) -> str:
    """A loss is the expected one; a file without one is refused, but for layers in their order."""
    for line in output.splitlines():
        given = re.search(r"loss ([\d.]+) expected ([\d.]+|None)", line)
        expected = given and given[2] != "None"
        if given and (abs(float(given[1]) - float(given[2])) > 1e-5 if expected else "fc1" not in line):
            return line[:160]
    return ""


def undamaged(output: str) -> str:
    """A damaged checkpoint is never resumed: the losses are those of a calm run, or it is refused."""
    lines = [line for line in output.splitlines() if " resume step " in line]
    wrong = [line for line in lines if "undisturbed run: False" in line]
    return wrong[0][:160] if wrong else "" if len(lines) == 12 else output[-160:]


def in_words(*raw: str) -> Judge:
    """Return the judge of an output that must have none of these."""
    return lambda output: next((word for word in raw if re.search(word, output)), "")


JUDGES: Mapping[tuple[str, str], Judge] = {
    ("T01-hwc-images", "run.py"): pictures,
    ("T02-rope-original-length", "run.py"): rotary,
    ("T03-dropout-seed-and-resume", "run.py"): repeated,
    ("T05-ignored-labels", "run.py"): counted,
    ("T05-ignored-labels", "run_b.py"): ignored,
    ("T07-extra-and-doubled-tensors", "run.py"): weights,
    ("T09-checkpoint-bit-flip", "run.py"): undamaged,
    ("T10-tokenizer-id-above-uint16", "run.py"): in_words("OverflowError"),
    ("T13-scalar-parameter-fsdp", "run.py"): in_words(
        "fully_shard doesn't", "RuntimeError", r"module says 0\).*e-0[1-4]"
    ),
    ("T14-test-targets-alone", "run.py"): in_words("test_targets alone +succeeded"),
    ("03-tied-embeddings", "run.py"): tied,
    ("07-sizes-that-do-not-divide", "run.py"): never_failed,
    ("09-nan", "run.py"): finite,
    ("09-nan", "run_last_step.py"): finite,
    ("09-nan", "run_last_step2.py"): finite,
    ("09-nan", "advice.py"): advice,
    ("12-cancel-kills-all", "run.py"): cancelled,
    ("13-evaluation-after-resume", "run_kill.py"): evaluated,
    ("13-evaluation-after-resume", "run_ctrl_c.py"): none_missing,
    ("14-unicode-names", "run.py"): found_by_name,
    ("18-disk-full", "run.sh"): full_disk,
}

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
