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
    """What became of the trainable parameters."""

    trainable: int
    """How many there are."""
    unreached: frozenset[str]
    """Parameters without a gradient in every iteration, or in one where eager has it."""
    unreached_eager: frozenset[str]
    """Parameters without a gradient in every iteration of eager."""
    moved: frozenset[str]
    """Changed by the updates."""
    moved_eager: frozenset[str]
    """Changed by the updates in eager, and not only by rounding."""
    compiled_backwards: tuple[int, ...]
    """How many compiled backward nodes ran, for each iteration."""
    unsharded: frozenset[str] = frozenset()
    """Whole on every rank after the last step, although FSDP shards them."""
    unused: frozenset[str] = frozenset()
    """Parameters without a gradient in eager, and without effect on any loss."""
    backwards_due: tuple[bool, ...] = ()
    """Whether each iteration is to have a compiled backward; if empty, all are."""


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
    """What compiling costs, and what a step does."""

    cold_s: float
    """Seconds to compile from nothing."""
    warm_s: float | None
    """Seconds to compile from a filled cache; ``None`` for a rung that generates no code, and takes nothing from one.
    """
    timed: Timed
    """The race with eager."""
    peak: Peak | None
    """Peak memory on CUDA."""
    eager_peak: Peak | None
    cache: bytes | None = None
    """The portable cache that the warm start took."""


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
    """Everything that was seen of one rung in one phase."""

    case: RungCase
    evidence: CompilerEvidence = field(default_factory=CompilerEvidence)
    error: str = ""
    """What it raised, if it did."""
    must_be_whole: bool = False
    """Whether a break of a graph is a failure."""
    comparisons: tuple[Comparison, ...] = ()
    """The worst of each kind, and the first that failed."""
    compared: int = 0
    """How many were made."""
    kinds: frozenset[str] = frozenset()
    """The kinds of tensors with any finite number."""
    training: TrainingOutcome | None = None
    """``None`` for inference."""
    cost: Cost | None = None
    truth_note: str = ""
    """Why float64 does not compute the same results."""
    notes: tuple[str, ...] = ()
    """Sentences for the report."""
    units: tuple[str, ...] = ()
    """The modules that were compiled."""
    calls: Calls = field(default_factory=dict)
    """How the uncompiled program calls them."""
    usage: Usage = field(default_factory=Usage)
    """How the program used them in the judged iterations."""
    own_limit: str = ""
    """A known limit of this rung alone that explains all wrong results."""
    audit: Audit = field(default_factory=Audit)
    """Stale memory that parity could not see."""
    draws: str = ""
    """The result whose distribution differs from eager's, with the random numbers of generated code."""
    crashed: bool = False
    """Whether a signal ended the process that ran it."""
    given_up: str = ""
    """Why it was not run to its end, if so."""
