"""Runs the queries of ``cases.py``: compares verdicts with the right ones, and bounds exported models."""

from __future__ import annotations

import re
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_rows import Row, running

from trivet import Client, Refused

LINE = re.compile(r"([\w.-]+): (verified|falsified|refused|any)\b\s*(.*)")
IN_DOUBT = "unknown without rigorous is no fault"
MAY_BE_REFUSED = "refused is no fault"
REFUSALS = ("UnsupportedModelError", "PropertyError")
"""Errors of a job that say in words what cannot be verified."""
DECIDED = frozenset({"verified", "falsified"})


@dataclass(frozen=True)
class Options:
    """How queries are asked: the seconds of each, and whether bounds hold over the reals."""

    seconds: float
    rigorous: bool


def run(cases: Path, part: str, names: list[str], options: Options) -> Iterator[Row]:
    """Yield a row for each query of the folders ``part``, or of the named ones."""
    with running() as service, service.client() as client:
        for folder in sorted(path for path in (cases / part).iterdir() if not names or path.name in names):
            for query, expected, note in _asked(folder):
                yield _row(part, client, folder, (query, expected, note), options)


def _asked(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each query with its verdict and a note, both empty if the text does not name it."""
    lines = (folder / "expected.txt").read_text().splitlines()
    known = {found[1]: (found[2], found[3]) for found in map(LINE.match, lines) if found}
    for path in sorted(folder.glob("*.vnnlib")):
        yield path.stem, *known.get(path.stem, ("", ""))


def _row(part: str, client: Client, folder: Path, asked: tuple[str, str, str], options: Options) -> Row:
    (query, expected, note), started = asked, time.monotonic()
    try:
        found = _decided(client, folder, query, options)
    except Refused as error:
        reason = str(error).splitlines()[-1]
        word = _word(expected, "refused", note) if expected else "told" if "outputs" in reason else "WRONG"
        return Row(part, folder.name, query, expected or "bounds", "refused", word, None, reason[:160])
    if isinstance(found, str):
        took, in_words = time.monotonic() - started, any(name in found for name in REFUSALS)
        said, judgement = ("refused", _word(expected, "refused", note)) if in_words else ("failed", "WRONG")
        return Row(part, folder.name, query, expected or "bounds", said, judgement, took, found[:160])
    widths = [high - low for low, high in zip(found["lower"], found["upper"], strict=True) if _numbers(low, high)]
    is_finite = bool(widths) and len(widths) == len(found["lower"])
    bounded = f"width {max(widths):.4g}" if is_finite else "bounds not finite"
    detail = f"{found['domains']} domains, {bounded}; {found['reason'] or found['note'] or ''}"
    word = _word(expected, found["verdict"], note) if expected else "right" if is_finite else "WRONG"
    said = found["verdict"] if expected or found["verdict"] in DECIDED else "bounds"
    return Row(part, folder.name, query, expected or "bounds", said, word, found["seconds"], detail)


def _word(expected: str, said: str, note: str) -> str:
    if expected in {said, "any"} or (said == "refused" and MAY_BE_REFUSED in note):
        return "right"
    if said == "refused":
        return "refused"
    if said in DECIDED or expected == "refused":
        return "WRONG"
    return "no fault" if IN_DOUBT in note else "undecided"


def _decided(client: Client, folder: Path, query: str, options: Options) -> dict[str, Any] | str:
    """Return the row of a query, or why its job failed."""
    files = {"model": {"onnx": _model(client, folder)}}
    files["property"] = {"vnnlib": client.upload(folder / f"{query}.vnnlib").id}
    search = {"method": "beta-crown", "rigorous": options.rigorous, "budget": {"seconds": options.seconds}}
    job = client.submit({"kind": "verify", "name": f"{folder.name} {query}", "device": "cpu", **files, **search})
    done = client.wait(job.id)
    rows = list(client.bounds(job.id))
    return rows[0] if done.state == "succeeded" and rows else str(done.error)


def _model(client: Client, folder: Path) -> str:
    """Upload the model, as a zip if its weights are in other files."""
    beside = [path for path in folder.iterdir() if path.name.endswith(".data")]
    if not beside:
        return client.upload(folder / "model.onnx").id
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / "model.zip"
        with zipfile.ZipFile(packed, "w") as archive:
            for path in (folder / "model.onnx", *beside):
                archive.write(path, path.name)
        return client.upload(packed).id


def _numbers(*ends: object) -> bool:
    return all(isinstance(end, int | float) for end in ends)
