"""Keeps a self-test that held for the next job of the same owner on this host, where it would be the same."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from service import compilation, models, parallel
from service.compilation.selftest.run import Proof
from service.jobs.atomic import atomic_write


@dataclass(frozen=True)
class SelfTest:
    """Holds proofs; ``kept_since`` tells when an earlier job made them, and is empty where this one did."""

    proofs: tuple[Proof, ...]
    kept_since: str = ""


def kept_or_run(run: Callable[[], tuple[Proof, ...]], folder: Path | None, device: str) -> SelfTest:
    """Return the proofs that ``folder`` holds for this host, device, torch and version of Trivet, else those of
    ``run``, which are kept there if all hold.
    """
    if folder is None:
        return SelfTest(run())
    path = folder / f"selftest-{_key(device)}.json"
    found = _read(path)
    if found is not None:
        return found
    proofs = run()
    if proofs and all(proof.holds for proof in proofs):
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"since": datetime.now(UTC).isoformat(timespec="seconds"), "proofs": [asdict(each) for each in proofs]}
        atomic_write(path, json.dumps(kept).encode())
    return SelfTest(proofs)


def _read(path: Path) -> SelfTest | None:
    try:
        kept = json.loads(path.read_bytes())
        proofs = tuple(Proof(**each) for each in kept["proofs"])
        found = SelfTest(proofs, str(kept["since"]))
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or one that was cut off
        return None
    return found if proofs and all(proof.holds for proof in proofs) else None


@cache
def _key(device: str) -> str:
    """Return a digest of what a self-test depends on: the sources that it runs through, torch, Python, the machine."""
    digest = hashlib.sha256()
    for each in (torch.__version__, platform.python_version(), platform.machine(), platform.node(), device):
        digest.update(f"{each}\n".encode())
    for room in (compilation, models, parallel):
        for path in sorted(Path(room.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
