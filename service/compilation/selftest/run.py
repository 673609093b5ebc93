"""Injects each fault and checks that its detector fires, and that none fires on a sound program."""

from __future__ import annotations

import gc
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from service import compilation, models, parallel
from service.compilation.detectors import judge
from service.compilation.run.baseline import make_baseline
from service.compilation.run.observation import Observation, RungCase
from service.compilation.run.observe_rung import observe_rung_untimed, rehearse_rung
from service.compilation.run.run_plan import RunPlan
from service.compilation.rungs import REHEARSAL
from service.compilation.selftest.faults import FAULTS, SOUND, Fault, FaultyProgram
from service.jobs.files import atomic_write
from service.jobs.spec.compile import Tolerance

PLAN = RunPlan(iterations=5, warm_up=2, steady=5, tolerance=Tolerance(), agree=lambda seconds: seconds)


@dataclass(frozen=True)
class Proof:
    """Says whether ``detector`` fired on ``fault``, and its message; on a sound program it must stay silent."""

    detector: str
    fault: str
    fired: bool
    message: str

    @property
    def holds(self) -> bool:
        return self.fired == (self.detector != "none")


@cache
def self_test() -> tuple[Proof, ...]:
    """Return a proof per fault, and one for a program without any. Runs on the CPU, without the other ranks.

    It forgets everything compiled in this process. Once per process: it depends on nothing but the installed torch.
    """
    with _older_objects_set_aside():
        return (*(_proof(fault) for fault in FAULTS), _silence())


@contextmanager
def _older_objects_set_aside() -> Iterator[None]:
    """Hide existing objects from the collector: holders of a result are searched for among all objects that it
    knows, and none of a million imported ones is a holder.
    """
    if gc.get_freeze_count():  # by the process that forked this one
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _proof(fault: Fault) -> Proof:
    found = [
        finding
        for finding in judge(_observe(fault.program, RungCase(fault.rung, fault.phase)))
        if finding.verdict == fault.verdict and fault.words in finding.message
    ]
    return Proof(fault.detector, fault.name, bool(found), found[0].message if found else "")


def _silence() -> Proof:
    found = judge(_observe(SOUND, RungCase(REHEARSAL, "train")))
    return Proof("none", "nothing", bool(found), found[0].message if found else "")


def _observe(program: FaultyProgram, case: RungCase) -> Observation:
    baseline = make_baseline(program, case.phase, PLAN.iterations)
    return (rehearse_rung if case.rung.rehearses else observe_rung_untimed)(program, case, baseline, PLAN)


@dataclass(frozen=True)
class SelfTest:
    """Holds proofs; ``kept_since`` tells when an earlier job made them, and is empty if this one did."""

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
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or a truncated one
        return None
    return found if proofs and all(proof.holds for proof in proofs) else None


@cache
def _key(device: str) -> str:
    """Return a digest of everything a self-test depends on: its sources, torch, Python, the machine."""
    digest = hashlib.sha256()
    for each in (torch.__version__, platform.python_version(), platform.machine(), platform.node(), device):
        digest.update(f"{each}\n".encode())
    for room in (compilation, models, parallel):
        for path in sorted(Path(room.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
