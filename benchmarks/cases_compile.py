"""Runs the compile cases of ``cases.py``: a faulty program must not pass the named rung; a sound one passes all."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_rows import Row, running, skipped

from service.jobs.spec.compile import MODES
from trivet import Client, Refused

PART = "compile"
SOUND = frozenset({"pass", "not_applicable"})
PHASES = ("train", "inference")
ON_CUDA = "its fault shows on a CUDA device alone"


@dataclass(frozen=True)
class Case:
    """A program with its phases, the rungs that must stop it, and whether it is sound."""

    name: str
    phases: list[str]
    right: str
    is_sound: bool


def run(cases: Path, names: list[str], device: str) -> Iterator[Row]:
    """Yield a row for each program, or for the named ones, checked on a device."""
    with tempfile.TemporaryDirectory() as scratch:
        packages = Path(scratch) / "packages"
        _install(cases / "compile", packages)
        found = [_described(path) for path in sorted((cases / "compile" / "expected").glob("*.txt"))]
        yield from _of_package(packages, found, names, device)
    # Theirs have the same name in a package of their own.
    found = [_told_by_name(path) for path in sorted((cases / "compile" / "T-programs").glob("[ds][0-9]*.py"))]
    yield from _of_package(cases / "training" / "T-plugin", found, names, device)


def _of_package(packages: Path, found: list[Case], names: list[str], device: str) -> Iterator[Row]:
    wanted = [case for case in found if not names or case.name in names]
    if not wanted:
        return
    with running({"PYTHONPATH": str(packages)}) as service, service.client() as client:
        for case in wanted:
            if device == "cpu" and case.right == ON_CUDA:
                yield skipped(PART, case.name, ON_CUDA)
            else:
                yield _checked(case, client, device)


def _described(path: Path) -> Case:
    text = path.read_text()
    right = ON_CUDA if _line(text, "reproduces").startswith("on CUDA") else _line(text, "right verdict")
    phases = re.findall(r"'(\w+)'", text.partition("phases")[2]) or list(PHASES)
    return Case(path.stem, phases, right, path.stem.startswith("c"))


def _told_by_name(path: Path) -> Case:
    """Return a program of those that say in their own file what they run; Inductor breaks one of the tutorials."""
    told = re.search(r"^    phases = (.*)$", path.read_text(), re.MULTILINE)
    phases = re.findall(r"\w+", told[1].replace('"', "")) if told else list(PHASES)
    is_sound = path.stem.startswith("s") and path.stem != "s02_mnist"
    return Case(path.stem, phases, "every rung passes" if is_sound else "some rung stops it", is_sound)


def _install(source: Path, packages: Path) -> None:
    """Put the package beside the metadata that declares its programs, like pip."""
    shutil.copytree(source / "compilecases", packages / "compilecases")
    about = packages / "compilecases-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: compilecases\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[trivet.programs]\ncase = compilecases.declared:PROGRAM\n")


def _checked(case: Case, client: Client, device: str) -> Row:
    started, told = time.monotonic(), (PART, case.name, "", case.right)
    spec = {"kind": "compile", "name": case.name, "device": device, "phases": case.phases}
    try:
        job = client.wait(client.submit({**spec, "program": {"name": "case", "case": case.name}}).id)
    except Refused as error:
        return Row(*told, "refused", "WRONG", time.monotonic() - started, str(error)[-160:])
    seconds = time.monotonic() - started
    if job.state != "succeeded":
        return Row(*told, str(job.state), "WRONG", seconds, str(job.error)[:160])
    rungs = {(row["phase"], row["rung"]): _verdict(row) for row in client.report(job.id)["rungs"]}
    stopped = {f"{phase} {rung}": verdict for (phase, rung), verdict in rungs.items() if verdict not in SOUND}
    is_right = not stopped if case.is_sound else _is_stopped(case.right, rungs)
    said = next((f"{place}: {verdict}" for place, verdict in stopped.items()), "every rung passes")
    detail = ", ".join(f"{place} {verdict}" for place, verdict in stopped.items() if verdict != "not_reached")
    return Row(*told, said, "right" if is_right else "WRONG", seconds, detail)


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
    named = {rung for rung in MODES if re.search(rf"(?<![\w-]){rung}(?![\w-])", right)} or set(MODES)
    phases = {right.partition(":")[0]} & set(PHASES) or set(PHASES)
    return any(verdict not in SOUND for (ran, rung), verdict in rungs.items() if ran in phases and rung in named)
