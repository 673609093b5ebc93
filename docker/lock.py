"""Writes the files of exact versions and SHA-256 digests that images are built from: ``make lock``.

``requirements.lock`` has what the API needs, with what builds the service's package; ``worker.lock`` what ranks need
besides, but torch; ``torch-cuda.lock`` torch and what only torch brings, and ``torch-cpu.lock`` the same of an index of
CPU wheels, where one is named. Versions are those of constraints.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OLDEST_PYTHON = "3.11"
OF_RANKS = ("onnxruntime", "pyarrow", "safetensors", "scikit-learn", "scipy", "tokenizers", "torch")
"""Requirements that only ranks import."""
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
    """Write the files beside pyproject.toml; ``index`` is a further one, for torch without CUDA, whose lock is left as
    it is without.
    """
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = described["project"]
    needed: list[str] = [*project["dependencies"], *project["optional-dependencies"]["service"]]
    needed += described["build-system"]["requires"]
    torch = [each for each in needed if _name(each) == "torch"]
    service = _resolve([each for each in needed if _name(each) not in OF_RANKS], None)
    whole = _resolve([each for each in needed if each not in torch], None)
    locks = {
        "requirements.lock": service,
        "worker.lock": {name: entry for name, entry in whole.items() if name not in service},
        "torch-cuda.lock": _besides(whole, _resolve(torch, None)),
    }
    if index is not None:
        locks["torch-cpu.lock"] = _besides(whole, _resolve(torch, index))
    for name, locked in locks.items():
        (ROOT / name).write_text(_HEAD + "".join(f"{locked[each]}\n" for each in sorted(locked)))


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0].lower()


def _besides(whole: dict[str, str], brought: dict[str, str]) -> dict[str, str]:
    return {name: entry for name, entry in brought.items() if name not in whole}


if __name__ == "__main__":
    main(next((word for word in sys.argv[1:] if word), None))
