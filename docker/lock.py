"""Writes the files of exact versions and SHA-256 digests that images are built from: ``make lock``.

``requirements.lock`` has all that the service needs but torch, with what builds its package; ``torch.lock`` has torch
and what only torch brings. Versions are those of constraints.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OLDEST_PYTHON = "3.11"
_HEAD = "# Made by `make lock`: every version and digest that an image is built from.\n"


def entries(text: str) -> dict[str, str]:
    """Return the entries of a lock by the name of the package; each has its digests on lines of its own."""
    found = re.findall(r"^(([A-Za-z0-9._-]+)(?:\[.*?\])?==.*(?:\\\n +--hash=\S+ ?)+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): entry.rstrip() for entry, name in found}


def _resolve(requirements: list[str], index: str | None) -> dict[str, str]:
    """Return the closure of requirements for every platform. A torch of another index has that index's version."""
    uv = str(Path(sys.executable).with_name("uv"))
    constraints = (ROOT / "constraints.txt").read_text()
    if index is not None:
        constraints = re.sub(r"(?m)^torch==.*\n", "", constraints)
    here = ROOT / "build"
    here.mkdir(exist_ok=True)
    (here / "lock.constraints").write_text(constraints)
    words = ["pip", "compile", "-", "--constraint", str(here / "lock.constraints"), "--generate-hashes", "--universal"]
    words += ["--python-version", _OLDEST_PYTHON, "--no-annotate", "--no-header", "--quiet"]
    words += ["--allow-unsafe"] if index is None else ["--allow-unsafe", "--index", index]
    made = subprocess.run([uv, *words], input="\n".join(requirements), text=True, stdout=subprocess.PIPE, check=True)
    return entries(made.stdout)


def main(index: str | None) -> None:
    """Write both files beside pyproject.toml; ``index`` is a further one, for torch."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed: list[str] = [*described["project"]["dependencies"], *described["build-system"]["requires"]]
    torch = [each for each in needed if re.match(r"torch\b", each)]
    service = _resolve([each for each in needed if each not in torch], None)
    brought = _resolve(torch, index)
    for name, locked in (
        ("requirements.lock", service),
        ("torch.lock", {name: entry for name, entry in brought.items() if name not in service}),
    ):
        (ROOT / name).write_text(_HEAD + "".join(f"{locked[each]}\n" for each in sorted(locked)))


if __name__ == "__main__":
    main(next((word for word in sys.argv[1:] if word), None))
