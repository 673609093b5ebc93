"""What tunes a search: its attacks, its branching, and how it spends its time. None of it decides what is true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.verification.bab.activations.optimiser import OptimiserSettings


@dataclass(frozen=True)
class AttackSettings:
    """Projected gradient descent for counterexamples.

    Before a search, ``samples`` random inputs are evaluated, and ``restarts`` of them descend for ``steps`` steps;
    other starts are first moved by ``diversifying_steps`` steps of ODI. ``time_share`` is the share of a decision's
    time in which that must be over; on small networks it takes much less. ``values`` are the entries of all of the
    network's values that the samples may take.

    In a search, the best ``box_starts`` points of a round's boxes take ``box_steps`` steps, each half as long as the
    one before. ``candidates`` is how many inputs that seem to violate the property are looked at in float64 at a time.

    At most ``largest_batch`` inputs go through the network together, and all samples in at most ``largest_parts`` such
    batches: fewer are drawn where memory makes the batches small. ``value_copies`` and ``input_copies`` are how many
    tensors like all of the network's values, and like its input, a gradient and an optimiser hold for each start.
    """

    restarts: int = 64
    steps: int = 60
    diversifying_steps: int = 5
    samples: int = 4096
    time_share: float = 0.2
    values: int = 2**25
    box_starts: int = 32
    box_steps: int = 4
    candidates: int = 8
    largest_batch: int = 4096
    largest_parts: int = 64
    value_copies: int = 3
    input_copies: int = 16


@dataclass(frozen=True)
class BranchingSettings:
    """Filtered smart branching over activations.

    Each score nominates ``candidates`` entries of every domain. The bound of a half is tried with the shares
    ``multiplier_shares`` of the multiplier with which it has the bound of its whole. A candidate is worth what the
    half that gains less gains, ``better_half_weight`` times what the other gains, and ``prior_weight`` times its first
    score, which decides where real bounds show no gain. An entry narrower than the share ``narrowest`` of its width at
    the root is not split, unless at a kink: such splits gain nothing but rounding.
    """

    candidates: int = 2
    multiplier_shares: tuple[float, ...] = (0.0, 0.5)
    better_half_weight: float = 0.5
    prior_weight: float = 0.02
    narrowest: float = 1e-4


@dataclass(frozen=True)
class ActivationSearchSettings:
    """Branch and bound over activations.

    Whole boxes are optimised by ``from_scratch``, and halves, whose parameters begin where those of the whole were
    best, by ``onward``. A round bounds at most ``largest_batch`` domains, looks for a counterexample by descent from
    ``starts`` of their minimisers, and solves linear programs for ``program_seconds``, whose end other domains wait
    for.

    A search that is not over after ``quick_seconds``, or the share ``quick_share`` of its time, tightens what all its
    domains share, and again whenever it has taken twice as long. The first time may take the share
    ``optimising_share`` of the time that is left: it optimises relaxations and splits nothing. Later times may take
    ``refining_share`` of it, and no more than went by. Where the share ``closed_share`` of the relaxations was no
    longer needed, the next time follows at once and is ``lengthening`` times as long.
    """

    from_scratch: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(60, slopes=0.1))
    onward: OptimiserSettings = field(default_factory=lambda: OptimiserSettings(5, slopes=0.03))
    branching: BranchingSettings = field(default_factory=BranchingSettings)
    largest_batch: int = 8192
    starts: int = 16
    program_seconds: float = 1.0
    quick_seconds: float = 1.0
    quick_share: float = 0.05
    optimising_share: float = 0.6
    refining_share: float = 0.5
    closed_share: float = 0.25
    lengthening: float = 2


@dataclass(frozen=True)
class InputSearchSettings:
    """Branch and bound over boxes of inputs.

    It is for at most ``most_inputs`` inputs that vary: halving one of many gains nothing. A round has at most
    ``largest_batch`` boxes, whose rows take at most ``entries`` numbers, by kind of device. A box is not cut below the
    share ``smallest_width`` of the whole width.

    Of every open box ``places`` points are tried as counterexamples. After ``first_attack`` boxes all of the box is
    attacked again, and then whenever there are ``later_attacks`` times as many, by ``samples_per_box`` samples for
    every box that was bounded, up to ``most_samples``.
    """

    most_inputs: int = 64
    largest_batch: Mapping[str, int] = field(default_factory=lambda: {"cpu": 4096, "cuda": 32768})
    entries: Mapping[str, int] = field(default_factory=lambda: {"cpu": 2**23, "cuda": 2**30})
    smallest_width: float = 1e-9
    places: int = 3
    first_attack: int = 2048
    later_attacks: int = 6
    samples_per_box: int = 32
    most_samples: int = 2**18


@dataclass(frozen=True)
class SearchSettings:
    """All of a decision's settings.

    Half of a box of more than ``several_inputs`` inputs is hardly easier than the box: activations are split first,
    for the share ``activations_first`` of the time.
    """

    attack: AttackSettings = field(default_factory=AttackSettings)
    activations: ActivationSearchSettings = field(default_factory=ActivationSearchSettings)
    inputs: InputSearchSettings = field(default_factory=InputSearchSettings)
    several_inputs: int = 16
    activations_first: float = 0.1
