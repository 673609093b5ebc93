"""Defines the rows of ``cases.py``, and runs scripts of cases against a service."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from chaos_service import Service

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("part", "case", "query", "expected", "said", "judgement", "seconds", "detail")


@dataclass(frozen=True)
class Row:
    """A query, a script or a program of a case: the right answer, the service's answer, and whether they agree."""

    part: str
    case: str
    query: str
    expected: str
    said: str
    judgement: str
    seconds: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        took = "" if self.seconds is None else f"{self.seconds:.1f} s"
        shown = f"{self.part:12} {self.case:32} {self.query:20} {self.expected:24} {self.said:24}"
        return f"{shown} {self.judgement:10} {took:>8}  {self.detail}"

    def markdown(self) -> str:
        took = "–" if self.seconds is None else f"{self.seconds:.1f}"
        cells = (self.part, self.case, self.query, self.expected, self.said, self.judgement, took, self.detail)
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def skipped(part: str, case: str, reason: str, query: str = "") -> Row:
    return Row(part, case, query, "", "skipped", "skipped", None, reason)


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Yield a service on a data folder of its own, which ends with it."""
    with TemporaryDirectory() as scratch:
        service = Service(Path(scratch) / "data", settings or {})
        service.start()
        try:
            yield service
        finally:
            service.stop()


def rewritten(folder: Path, words: Mapping[str, str]) -> None:
    """Replace placeholders by their values in all scripts of a folder."""
    for path in [*folder.rglob("*.py"), *folder.rglob("*.sh")]:
        text = path.read_text()
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        path.write_text(text)


@dataclass(frozen=True)
class Ran:
    """A script's output, its exit status (``None`` if its time ran out), and its seconds."""

    output: str
    status: int | None
    seconds: float

    @property
    def last(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1][:160] if lines else ""


def run_script(
    command: list[str], folder: Path, service: Service, limit: float, told: Mapping[str, str] | None = None
) -> Ran:
    """Run a script in a folder, with the service's data folder and port in its environment, and what it is ``told``."""
    environment = {"TRIVET_DATA": str(service.data), "TRIVET_PORT": str(service.port), **(told or {})}
    environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, status = process.communicate()[0], None
    finally:
        process.kill()  # this process may be asked to end meanwhile
    return Ran(output, status, time.monotonic() - started)


def python(script: str) -> list[str]:
    return [sys.executable, script]
