"""Lists the constants of the parity rule, besides the tolerance that a spec sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParitySettings:
    """The constants of the rule in :mod:`service.compilation.run.parity`."""

    small_tensors: tuple[tuple[int, float], ...] = ((10, 5.0), (500, 4.0), (1000, 1.5))
    """Pairs of a number of elements and a factor. The distance of few elements is noisy, so a tensor with at most that
    many is permitted a ratio larger by that factor. The first pair that fits counts.
    """
    noise_limit: float = 0.05
    """The largest distance between two eager runs, as a fraction of a tensor's scale, that leaves anything to judge. An
    error as large as that could not be told from noise.
    """
    scale_floor: float = 0.01
    """The smallest scale at which a tensor is judged, as a fraction of the largest scale among tensors of its kind."""
    same_computation: float = 0.05
    """The largest distance between an output of float64 and eager's, as a fraction of its size, at which both are the
    same computation.
    """
    cancelled: float = 0.5
    """The distance between eager and float64, as a fraction of eager's size, from which on no digit of eager's is
    right: the terms that were summed cancel.
    """
    some_lost: float = 8.0
    """The distance between eager and float64, in units in the last place, from which on the terms cancel in part. The
    tensor is then judged at the scale of its terms, which that distance tells.
    """
    most_lost: float = 16.0
    """The largest scale of terms that cancel in part, as a multiple of the tensor's own."""
    drift: float = 16.0
    """How far a tensor of a free iteration may be off, as a multiple of how far eager has drifted from float64 by
    then.
    """
    running_on: float = 10.0
    """How far it may be off in addition, as a multiple of the tolerance."""
    drift_limit: float = 0.003
    """The largest drift of eager, as a fraction of a tensor's size, up to which free iterations are compared."""
    tf32: float = 2.0
    """How far a compiled result may be off in addition, as a multiple of how far TF32 moves eager's: both are rounded,
    each in its own way.
    """
    tf32_limit: float = 0.01
    """The largest distance by which TF32 may move any result of eager, as a fraction of its scale. Beyond it errors
    would hide, so the check runs in full float32.
    """

    def judged_scale(self, own: float, largest: float, terms: float = 0.0) -> float:
        """Return the scale at which to judge a tensor of scale ``own``, whose kind has scales up to ``largest``.

        It is at least a fraction of the largest. Where a tensor's ``terms`` cancel it is theirs, up to the largest.
        """
        return max(own, self.scale_floor * largest, min(largest, terms))

    def ratio(self, elements: int, ratio: float) -> float:
        """Return the ratio that a tensor with this many elements is permitted; large ones are permitted ``ratio``."""
        return ratio * next((factor for limit, factor in self.small_tensors if elements <= limit), 1.0)


SETTINGS = ParitySettings()
