"""Runs the compile cases of ``cases.py``: a faulty program must not pass the named rung; a sound one passes all."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from case_rows import Row, running, skipped

from service.jobs.spec.compile import LADDER
from trivet import Client, Refused

PART = "compile"
SOUND = frozenset({"pass", "not_applicable"})


def run(cases: Path, names: list[str], device: str) -> Iterator[Row]:
    """Yield a row for each program, or for the named ones, checked on a device."""
    with tempfile.TemporaryDirectory() as scratch:
        packages = Path(scratch) / "packages"
        _install(cases / "compile", packages)
        with running({"PYTHONPATH": str(packages)}) as service, service.client() as client:
            for path in sorted((cases / "compile" / "expected").glob("*.txt")):
                if not names or path.stem in names:
                    yield _checked(path, client, device)


def _install(source: Path, packages: Path) -> None:
    """Put the package beside the metadata that declares its programs, like pip."""
    shutil.copytree(source / "compilecases", packages / "compilecases")
    about = packages / "compilecases-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: compilecases\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[trivet.programs]\ncase = compilecases.declared:PROGRAM\n")


def _checked(path: Path, client: Client, device: str) -> Row:
    text, started = path.read_text(), time.monotonic()
    right = _line(text, "right verdict")
    if device == "cpu" and _line(text, "reproduces").startswith("on CUDA"):
        return skipped(PART, path.stem, "its fault shows on a CUDA device alone")
    phases = re.findall(r"'(\w+)'", text.partition("phases")[2]) or ["train", "inference"]
    spec = {"kind": "compile", "name": path.stem, "device": device, "phases": phases}
    try:
        job = client.wait(client.submit({**spec, "program": {"name": "case", "case": path.stem}}).id)
    except Refused as error:
        return Row(PART, path.stem, "", right, "refused", "WRONG", time.monotonic() - started, str(error)[-160:])
    seconds = time.monotonic() - started
    if job.state != "succeeded":
        return Row(PART, path.stem, "", right, str(job.state), "WRONG", seconds, str(job.error)[:160])
    rungs = {(row["phase"], row["rung"]): _verdict(row) for row in client.report(job.id)["rungs"]}
    stopped = {f"{phase} {rung}": verdict for (phase, rung), verdict in rungs.items() if verdict not in SOUND}
    is_right = not stopped if path.stem.startswith("c") else _is_stopped(right, rungs)
    said = next((f"{place}: {verdict}" for place, verdict in stopped.items()), "every rung passes")
    detail = ", ".join(f"{place} {verdict}" for place, verdict in stopped.items() if verdict != "not_reached")
    return Row(PART, path.stem, "", right, said, "right" if is_right else "WRONG", seconds, detail)


def _verdict(row: Mapping[str, Any]) -> str:
    """Return the verdict of a rung, or its rehearsal's finding if it is not applicable on this device."""
    if row["rehearsal"] is not None and len(row["findings"]) > 1:
        return f"rehearsal {row['findings'][1]['verdict']}"
    return str(row["verdict"])


def _line(text: str, key: str) -> str:
    found = re.search(rf"^{key}[^:]*: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def _is_stopped(right: str, rungs: Mapping[tuple[str, str], str]) -> bool:
    """Return whether one of the named rungs does not pass, or any if none is named."""
    named = {rung for rung in LADDER if re.search(rf"(?<![\w-]){rung}(?![\w-])", right)} or set(LADDER)
    phase = right.partition(":")[0]
    return any(verdict not in SOUND for (ran, rung), verdict in rungs.items() if ran == phase and rung in named)
