"""Defines the observation of one rung in one phase, the only input of detectors."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.compilation.evidence import CompilerEvidence
from service.compilation.instruments.profile import Peak, Profile
from service.compilation.monitor.uncompiled_calls import Calls
from service.compilation.monitor.usage import Usage
from service.compilation.run.audit import Audit
from service.compilation.run.baseline import Baseline
from service.compilation.run.parity import Comparison
from service.compilation.run.recorded_run import RecordedRun
from service.compilation.run.timing import Race
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Phase


@dataclass(frozen=True)
class TrainingOutcome:
    """Holds the fate of the trainable parameters.

    ``unreached``: without a gradient in every iteration, or in one where eager has it; ``unreached_eager``: without one
    in every iteration of eager; ``unused``: those of them that affect no loss. ``moved`` and ``moved_eager``:
    changed by the updates, in eager not only by rounding. ``compiled_backwards``: compiled backward nodes, per
    iteration, and ``backwards_due`` whether there is to be one; in all of them unless given. ``unsharded``: whole on
    every rank after the last step, although FSDP shards them.
    """

    trainable: int
    unreached: frozenset[str]
    unreached_eager: frozenset[str]
    moved: frozenset[str]
    moved_eager: frozenset[str]
    compiled_backwards: tuple[int, ...]
    unsharded: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    backwards_due: tuple[bool, ...] = ()


def training_outcome(run: RecordedRun, baseline: Baseline) -> TrainingOutcome:
    """Return the fate of the trainable parameters in ``run``, beside eager's."""
    eager = baseline.eager
    lost = (mine.missing - theirs.missing for mine, theirs in zip(run.records, eager.records, strict=True))
    return TrainingOutcome(
        trainable=len(run.parameters),
        unreached=run.missing.union(*lost),
        unreached_eager=eager.missing,
        moved=run.moved,
        moved_eager=eager.moved - baseline.rounding_only,
        compiled_backwards=tuple(each.compiled_backward for each in run.records),
        unsharded=run.unsharded,
        unused=baseline.unused,
        backwards_due=baseline.backwards_due,
    )


@dataclass(frozen=True)
class Timed:
    """Holds the race of compiled with eager, and a profile of each; ``None`` if the profiler does not work.

    ``compiled_share``: of the operators of an uncompiled step, the part that runs in compiled code; ``None`` if it was
    not measured.
    """

    race: Race
    profile: Profile | None = None
    eager_profile: Profile | None = None
    compiled_share: float | None = None


@dataclass(frozen=True)
class Cost:
    """Seconds to compile from nothing and from a filled cache, the race with eager, peak memory on CUDA.

    ``warm_s`` is ``None`` for a rung that generates no code: it takes nothing from a cache. ``cache`` is the
    portable cache that the warm start took.
    """

    cold_s: float
    warm_s: float | None
    timed: Timed
    peak: Peak | None
    eager_peak: Peak | None
    cache: bytes | None = None


@dataclass(frozen=True)
class RungCase:
    """One rung in one phase."""

    rung: Rung
    phase: Phase

    @property
    def name(self) -> str:
        """Return its name in logs, metrics and files."""
        return f"{self.phase}/{self.rung.name}"


@dataclass(frozen=True)
class Observation:
    """One rung in one phase. ``error`` is set when it raised; ``training`` is ``None`` for inference.

    ``comparisons``: the worst of each kind, and the first that failed. ``compared``: how many were made, of tensors of
    the ``kinds`` that hold any finite number. ``units`` names the modules that were compiled; ``calls``: how the
    uncompiled program calls them; ``usage``: how the program used its compiled modules in the judged iterations.
    ``own_limit``: a known limit of this rung alone that explains all wrong results. ``audit``: stale memory that parity
    could not see. ``draws``: the result whose distribution differs from eager's, with the random numbers of generated
    code. ``crashed``: a signal ended the process that ran it. ``given_up``: why it was not run to its end, if so.
    ``must_be_whole``: no graph may break.
    """

    case: RungCase
    evidence: CompilerEvidence = field(default_factory=CompilerEvidence)
    error: str = ""
    must_be_whole: bool = False
    comparisons: tuple[Comparison, ...] = ()
    compared: int = 0
    kinds: frozenset[str] = frozenset()
    training: TrainingOutcome | None = None
    cost: Cost | None = None
    truth_note: str = ""
    notes: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    calls: Calls = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    own_limit: str = ""
    audit: Audit = field(default_factory=Audit)
    draws: str = ""
    crashed: bool = False
    given_up: str = ""
