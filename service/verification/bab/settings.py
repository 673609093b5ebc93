"""Holds the settings of a decision: a frozen dataclass for each algorithm. None of them affects the truth of a verdict.

Shares of the time are in :mod:`.time_plan`. A job sets only its ``budget`` (``service/jobs/spec/verify.py``), which
:mod:`service.verification.task` and :mod:`service.verification.search_runner` hand on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from service.bounds.methods import BoundOptions
from service.bounds.optimise import Ascent
from service.jobs.spec.verify import ATTACK_RESTARTS
from service.verification.bab.time_plan import TimePlan


@dataclass(frozen=True)
class AttackSettings:
    """Attacks: projected gradient descent for counterexamples, in :mod:`service.verification.bab.attack`.

    Before a search, ``samples`` random inputs are evaluated, and the best ``restarts`` of them descend for ``steps``
    steps, or ``restarts_per_disjunct`` for each disjunct where that is more; as many other starts are first moved by
    ``diversifying_steps`` steps of ODI. ``values`` are the entries of all of the network's values that the samples may
    take. A job sets ``restarts`` as ``budget.restarts``. ``first_steps`` are the shortest and the longest first
    step as shares of the box's width, of which the last one keeps the share ``last_step``; a step of ODI is
    ``diversifying_step`` of the width.

    In a search over inputs, the whole box is attacked again from ``search_restarts`` starts, or
    ``search_restarts_per_disjunct``, by ``search_first_steps``; and the best ``box_starts`` points of a round's boxes
    take ``box_steps`` steps, each half as long as the one before. A job sets none of these: without them a
    search would falsify nothing.

    So many starts descend at a time that they have at most ``together`` rows; of more, those of the nearest disjuncts
    come first.

    ``candidates`` is how many inputs that seem to violate the property are looked at in float64 at a time.

    At most ``largest_batch`` inputs go through the network together, and all samples in at most ``largest_parts`` such
    batches: fewer are drawn where memory makes the batches small. ``value_copies`` and ``input_copies`` are how many
    tensors like all of the network's values, and like its input, a gradient and an optimiser hold for each start.
    """

    restarts: int = ATTACK_RESTARTS
    restarts_per_disjunct: int = 2
    search_restarts: int = 256
    search_restarts_per_disjunct: int = 4
    steps: int = 60
    first_steps: tuple[float, float] = (0.02, 0.2)
    search_first_steps: tuple[float, float] = (0.001, 0.05)
    last_step: float = 0.002
    diversifying_steps: int = 5
    diversifying_step: float = 0.25
    samples: int = 4096
    values: int = 2**25
    box_starts: int = 32
    box_steps: int = 3
    candidates: int = 8
    together: int = 2**21
    largest_batch: int = 4096
    largest_parts: int = 64
    value_copies: int = 3
    input_copies: int = 16


@dataclass(frozen=True)
class StepSettings:
    """Attacks at the steps of a model that jumps, in :mod:`service.verification.bab.steps`.

    It tries ``points`` of every kind: any inputs, corners, and inputs at which ``climbs`` steps made a value that
    decides steps nearly least or greatest. Each of the ``rounds`` narrows twice as many pairs of them to a step, by
    ``halvings`` of their distance and then of the numbers between them, and also tries inputs at the shares ``apart``
    of the pair's first distance from it, the farthest first: rounding hides less there. A search tries ``boxes`` of a
    round, and as many that are too small to be split. ``candidates`` are tried at a time. All numbers shrink where so
    many inputs have more than ``values`` numbers within the network.
    """

    points: int = 256
    climbs: int = 4
    rounds: int = 3
    halvings: int = 16
    apart: tuple[float, ...] = (2.0**-8, 2.0**-12, 2.0**-16, 2.0**-20)
    boxes: int = 64
    candidates: int = 64
    values: int = 2**24


@dataclass(frozen=True)
class OptimiserSettings:
    """Gradient ascent of the parameters of domains.

    ``slope_step`` is in units of the range of the slopes, ``multiplier_step`` of the coefficients that arrive at the
    split entries, and ``weight_step`` of the rows' weights; all are multiplied by ``decay`` after each iteration. The
    ascent ends early at ``deadline`` (``time.monotonic``), but not where others take part, who may see another time.
    After ``doubts_after`` it ends as soon as the pace of the last iterations would leave a domain open.
    Whether all domains are proved is looked at every ``check_every`` iterations, since each look waits for the device.
    ``adam_decays`` and ``adam_epsilon`` are those of the multipliers' Adam (Kingma and Ba, 2015).
    """

    iterations: int
    slope_step: float
    multiplier_step: float = 0.1
    weight_step: float = 0.1
    decay: float = 0.97
    deadline: float = inf
    doubts_after: float = field(default=inf, compare=False)
    check_every: int = 5
    adam_decays: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-12

    def within(self, options: BoundOptions, deadline: float = inf) -> OptimiserSettings:
        """Scale the number of steps and the decay per step to a method's number of steps."""
        usual, wanted = Ascent().iterations, options.ascent.iterations
        iterations = -(-self.iterations * wanted // usual)
        return replace(self, iterations=iterations, decay=self.decay ** (usual / wanted), deadline=deadline)


@dataclass(frozen=True)
class RecordingSettings:
    """Records of an optimisation on a CUDA device, which serve all batches of about one size.

    A batch is filled up to at least ``smallest_batch`` domains of ``fewest_splits`` splits, and to sizes that are a
    power of two apart, a quarter of one beyond ``finer_beyond`` domains. Of a batch of more than ``largest_bytes`` the
    kernels take longer than their launches, and there is no record. There are at most ``most`` records, and together
    they take one in ``memory_divisor`` bytes of the memory that is free.
    """

    smallest_batch: int = 8
    fewest_splits: int = 8
    finer_beyond: int = 64
    largest_bytes: int = 2**33
    most: int = 256
    memory_divisor: int = 4


@dataclass(frozen=True)
class DomainBoundsSettings:
    """Batches of domains that are bounded together.

    A pass with gradients keeps roughly ``floats_per_value`` numbers of each domain for each value, and for each that
    is relaxed ``floats_per_piecewise`` (by two lines) or ``floats_per_curved`` (by one of many curves or planes). A
    batch on the host takes at most ``largest_host_bytes``, beyond which none is faster, and has at most
    ``most_domains`` anywhere: more are no faster, and other processes may want the memory, too. Free memory is asked
    for again after ``plan_seconds``: a driver answers slowly.
    """

    floats_per_value: int = 8
    floats_per_piecewise: int = 24
    floats_per_curved: int = 100
    largest_host_bytes: int = 2**31
    most_domains: int = 2**15
    plan_seconds: float = 1.0
    recording: RecordingSettings = field(default_factory=RecordingSettings)


@dataclass(frozen=True)
class PoolSettings:
    """Domains that wait.

    Beyond ``crowded_bytes`` those with the largest margins are taken first, which leave least behind. A pool
    that exceeds one in ``memory_divisor`` bytes of its own and the device's free memory is kept in host memory.
    """

    crowded_bytes: int = 2**32
    memory_divisor: int = 4


@dataclass(frozen=True)
class EntryBatchSettings:
    """The number of entries of a layer that are bounded together.

    At first there are ``fewest``, and twice as many after every batch that took less than ``quick_seconds``, up to
    ``most``; on a CUDA device, where many take as long as few, ``most`` at once.
    """

    fewest: int = 32
    most: int = 1024
    quick_seconds: float = 0.5

    def first(self, is_cuda: bool) -> int:
        """Return the size of the first batch."""
        return self.most if is_cuda else self.fewest

    def after(self, count: int, seconds: float) -> int:
        """Return the size of the batch after one of ``count`` entries that took ``seconds``."""
        return min(2 * count, self.most) if seconds < self.quick_seconds else count


@dataclass(frozen=True)
class BranchingSettings:
    """Filtered smart branching over activations.

    Each score nominates ``candidates`` entries of every domain. The bound of a half is tried with the shares
    ``multiplier_shares`` of the multiplier with which it has the bound of its whole. A candidate is worth the gain of
    the half that gains less, ``better_half_weight`` times the gain of the other, and ``prior_weight`` times its first
    score, which decides where real bounds show no gain. An entry narrower than the share ``narrowest`` of its width at
    the root is not split, unless at a kink: such splits gain nothing but rounding.
    """

    candidates: int = 2
    multiplier_shares: tuple[float, ...] = (0.0, 0.5)
    better_half_weight: float = 0.5
    prior_weight: float = 0.02
    narrowest: float = 1e-4


@dataclass(frozen=True)
class IntermediateSettings:
    """Tighter intermediate bounds for all domains of a search: optimised, and then by branch and bound.

    A layer's bounds are optimised by at least ``fewest_iterations``, or not at all. Branch and bound optimises roots by
    ``from_scratch`` and halves by ``warm_start``, and keeps at most ``most_leaves`` times as many leaves as are
    optimised together, since each takes many times as much; ``batches`` are entries whose ends are bounded together.
    """

    fewest_iterations: int = 3
    from_scratch: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(20, slope_step=0.2))
    warm_start: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(10, slope_step=0.02))
    most_leaves: int = 16
    batches: EntryBatchSettings = field(default_factory=EntryBatchSettings)


@dataclass(frozen=True)
class InvpropSettings:
    """Bounds of hidden values where the property fails (INVPROP, Kotha et al., 2023).

    A weight of 1 on a row is the share ``pressure`` of an entry's width for the margin that the whole box lacks, of
    which ``least_lacking`` counts at least. A layer whose open entries gain less than the share ``least_layer_gain``
    of their widths is not tightened again, and no layer is unless the last round brought the share
    ``least_margin_gain`` of the margin that the whole box lacks; all layers are where a proof is in sight at the pace
    of that round. ``batches`` are entries whose ends are bounded together.
    """

    optimiser: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(20, slope_step=0.1))
    pressure: float = 0.3
    least_lacking: float = 1e-6
    least_layer_gain: float = 0.01
    least_margin_gain: float = 0.05
    batches: EntryBatchSettings = field(default_factory=EntryBatchSettings)


@dataclass(frozen=True)
class ClippingSettings:
    """Bounds of the first layer in each domain, if its unstable entries have at most ``most_slopes`` slopes together: a
    domain costs as many products for each of its splits, where the bound is close to a proof.

    At most ``entries`` numbers are looked at together. Both are by kind of device.
    """

    most_slopes: Mapping[str, int] = field(default_factory=lambda: {"cpu": 2**15, "cuda": 2**18})
    entries: Mapping[str, int] = field(default_factory=lambda: {"cpu": 2**21, "cuda": 2**26})


@dataclass(frozen=True)
class ActivationSearchSettings:
    """Branch and bound over activations.

    Whole boxes are optimised by ``from_scratch``, and halves, whose parameters begin where those of the whole were
    best, by ``warm_start``. A round splits at most ``largest_batch`` domains, by kind of device, and looks for a
    counterexample by descent from ``starts`` of their minimisers.
    """

    from_scratch: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(60, slope_step=0.1))
    warm_start: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(5, slope_step=0.03))
    largest_batch: Mapping[str, int] = field(default_factory=lambda: {"cpu": 8192, "cuda": 16384})
    starts: int = 16
    branching: BranchingSettings = field(default_factory=BranchingSettings)
    domain_bounds: DomainBoundsSettings = field(default_factory=DomainBoundsSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    intermediate: IntermediateSettings = field(default_factory=IntermediateSettings)
    invprop: InvpropSettings = field(default_factory=InvpropSettings)
    clipping: ClippingSettings = field(default_factory=ClippingSettings)


@dataclass(frozen=True)
class InputSearchSettings:
    """Branch and bound over boxes of inputs.

    It is for at most ``most_inputs`` inputs that vary: halving one of many gains nothing. A round has at most
    ``largest_batch`` boxes, whose rows take at most ``entries`` numbers, by kind of device. No input is split below the
    share ``smallest_width`` of the whole width, and each box is clipped ``clipping_rounds`` times to where a
    counterexample may be. Beyond ``crowded_entries`` of a pool, by kind of device, boxes leave the device and
    wait without the bounds of their values.

    Of every open box ``points_per_box`` points are tried as counterexamples. After ``first_attack`` boxes all of the
    box is attacked again, and then whenever there are ``later_attacks`` times as many, by ``samples_per_box`` samples
    for every box that was bounded, up to ``most_samples``.
    """

    most_inputs: int = 64
    largest_batch: Mapping[str, int] = field(default_factory=lambda: {"cpu": 4096, "cuda": 32768})
    entries: Mapping[str, int] = field(default_factory=lambda: {"cpu": 2**23, "cuda": 2**30})
    smallest_width: float = 1e-9
    clipping_rounds: int = 3
    crowded_entries: Mapping[str, int] = field(default_factory=lambda: {"cpu": 2**26, "cuda": 2**30})
    points_per_box: int = 3
    first_attack: int = 2048
    later_attacks: int = 6
    samples_per_box: int = 32
    most_samples: int = 2**18


@dataclass(frozen=True)
class SearchSettings:
    """All of a decision's settings.

    If inputs may be split, that is, up to ``most_inputs`` of :class:`InputSearchSettings`, the search over them
    takes turns with one over activations. It begins if at most ``several_inputs`` vary, and with a long turn if
    at most ``few_inputs`` vary.
    """

    time: TimePlan = field(default_factory=TimePlan)
    attack: AttackSettings = field(default_factory=AttackSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    activations: ActivationSearchSettings = field(default_factory=ActivationSearchSettings)
    inputs: InputSearchSettings = field(default_factory=InputSearchSettings)
    few_inputs: int = 6
    several_inputs: int = 16
