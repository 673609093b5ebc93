"""Compares a rung that draws other random numbers than eager by distribution, over seeds.

Two groups of samples, eager's and the rung's, count as one distribution if no statistic of theirs stands out among
those of groups in which samples of the same step have changed sides at random (a permutation test, which assumes
nothing about the distribution). The statistics are, for each tensor, the distances of the means, of the second moments,
and of the products with the loss and outputs, each over what is finite, and of how often there is NaN or an infinity;
and, as a fault of one element is lost among many, the largest distance of a mean relative to how much that element
varies. The elements that were furthest off draw by draw are among those that are looked at. A few NaN stand out among
no statistics, so a tensor that has them for some seeds on one side alone is named at once. None of this shows a
gradient that used other draws than its forward, so for some seeds the slope of the loss along its gradients is compared
too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from service.compilation.host_fault import raise_host_fault
from service.compilation.instruments.switches import nothing_compiled
from service.compilation.run.baseline import Baseline
from service.compilation.run.built_program import BuiltProgram, build, record_step
from service.compilation.run.oracles import distances, is_rounding, scale_of
from service.compilation.run.parity import Comparison
from service.compilation.run.parity_settings import SETTINGS
from service.compilation.run.recorded_run import RecordedRun, Snapshot
from service.compilation.run.sampling import WHOLE, Key, spread
from service.jobs.spec.compile import Tolerance

_JUDGED = frozenset({"loss", "output", "gradient"})
_NOT_FINITE = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
_BY_CHANCE = 8
"""The seeds from which on NaN or an infinity on one side alone is no chance, which would be one in 256, twice."""
_PERMUTED = 0xD15
_MEAN = "the mean"
_TINY = 1e-300
_FIRST = 10**6
"""A seed beyond those of iterations: eager takes even ones from there on, compiled the others."""
_MOVED = 4
"""Units in the last place."""
_SLOPES_ROUNDING = 0.01
"""How far rounding may move slopes apart, relative to their size: they come from small differences."""
_STEP = 0.01
"""How far each parameter is moved at most along its gradient, and thereby the loss, relative to their size."""
_COARSER = 8.0
"""How far rounding may move an element, as a multiple of how far it moves eager's from float64 on average."""
Recorded = Callable[[BuiltProgram, Snapshot, int], Mapping[Key, Tensor]]
Places = Mapping[tuple[Key, int], Tensor]
"""Elements of tensors to look at, by the tensor and how many it has: another shape is another tensor."""
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


SEEDS = 96
"""The most seeds that each side runs with."""
FEWEST = 24
"""The fewest, where all would take too long."""
SLOPES = 12
"""The seeds with which slopes are measured."""
BUDGET_S = 10.0
"""Seconds of a processor after which fewer seeds are taken; they do not depend on what else runs."""
ELEMENTS = 128
"""The most elements of a tensor that are looked at."""
PERMUTATIONS = 500
"""The groups drawn at random among which the statistics must not stand out."""
RELATED = 32
"""The most elements of two tensors that are related to each other."""


def differs_in_distribution(
    compiled: BuiltProgram,
    baseline: Baseline,
    tolerance: Tolerance,
    agree: Callable[[float], float],
    places: Places = _NOTHING,
) -> tuple[str, int]:
    """Return the tensor whose distribution in the compiled program differs from eager's, empty if there is none, and
    over how many seeds of the two it was compared; the elements at ``places`` are compared besides a sample.

    It must stand out again with other seeds. ``agree`` makes one number for all out of each rank's.
    """
    eager = build(compiled.program, compiled.phase)
    rounding, coarser = _rounding_only(eager, baseline), _permitted(baseline, tolerance)
    found, seeds = "", SEEDS
    for first in (_FIRST, 2 * _FIRST):
        sides = [_samples(each, baseline, first + own, agree, places) for own, each in enumerate((eager, compiled))]
        # Of a rank without anything to compare, such as a frozen stage, there are none.
        seeds = min([seeds, *(len(value) for side in sides for group in side for value in group.values())])
        by_step = (_apart(_without(rounding, groups), tolerance, coarser) for groups in zip(*sides, strict=True))
        found = next(filter(None, by_step), "")
        if not agree(float(bool(found))):
            found = _slopes_apart(eager, compiled, baseline, first, agree)
        if not agree(float(bool(found))):
            break
    return found, seeds


def furthest_off(wrong: Iterable[Comparison], run: RecordedRun, baseline: Baseline) -> Places:
    """Return the elements of each wrong tensor that are furthest from eager's, over all iterations that are judged: if
    they are wrong with any draws, they are so over many seeds, too.
    """
    off: dict[tuple[Key, int], Tensor] = {}
    for each in wrong:
        key = each.kind, each.name
        if each.iteration >= baseline.iterations or not _is_judged(key) or each.is_unlike:
            continue
        found, oracle = run.tensors[each.iteration].get(key), baseline.oracles[each.iteration].get(key)
        if found is not None and oracle is not None:
            apart = distances(found, oracle.eager).flatten().nan_to_num()
            off[key, len(apart)] = off.get((key, len(apart)), 0) + apart
    return {key: each.topk(min(len(each), ELEMENTS)).indices.sort().values for key, each in off.items()}


def _is_judged(key: Key) -> bool:
    return key[0].removesuffix(WHOLE) in _JUDGED


def _permitted(baseline: Baseline, tolerance: Tolerance) -> dict[Key, float]:
    """Return how far an element of each tensor may be off draw by draw, as a part of the tensor's size: by its
    tolerance and by rounding.
    """
    found: dict[Key, float] = {}
    for each in baseline.oracles[: baseline.iterations]:
        for key, oracle in each.items():
            moved = max(oracle.rounding, oracle.noise.rms, oracle.allowed.rms)
            if size := scale_of(oracle.eager):
                permitted = (tolerance.absolute * oracle.scale + _COARSER * moved) / size
                found[key] = max(found.get(key, 0.0), permitted)
    return found


def _rounding_only(built: BuiltProgram, baseline: Baseline) -> frozenset[Key]:
    """Return the gradients that are nothing but rounding, such as that of the bias of attention's keys: moving the
    numbers by a few units in the last place changes them, with the same draws. Another kernel rounds differently, with
    another spread.
    """
    if built.phase == "inference" or not baseline.eager.starts:
        return frozenset()
    first = baseline.eager.starts[0]
    one, other = (_step_from(built.restarted(), each, _FIRST) for each in (first, first.nudged(_MOVED)))
    apart = {key: one[key].double() - other[key].double() for key in one.keys() & other.keys() if _is_gradient(key)}
    sizes = {key: (scale_of(one[key]), scale_of(distance)) for key, distance in apart.items()}
    return frozenset(key for key, (own, moved) in sizes.items() if own > 0 and is_rounding(own, moved))


def _is_gradient(key: Key) -> bool:
    return key[0].removesuffix(WHOLE) == "gradient"


def _without(rounding: Collection[Key], groups: Sequence[Mapping[Key, Tensor]]) -> list[Mapping[Key, Tensor]]:
    """Return the samples without gradients that are nothing but rounding, and small beside others, in all of them."""
    small = set(rounding)
    for group in groups:
        largest = max((scale_of(each) for key, each in group.items() if _is_gradient(key)), default=0.0)
        small = {key for key in small if key in group and scale_of(group[key]) <= SETTINGS.scale_floor * largest}
    return [{key: each for key, each in group.items() if key not in small} for group in groups]


def _apart(
    groups: Sequence[Mapping[Key, Tensor]], tolerance: Tolerance, coarser: Mapping[Key, float] = _NOTHING
) -> str:
    eager, compiled = groups[0], _without_zeros(groups[1], groups[0])
    if eager.keys() != compiled.keys():
        return f"{' '.join(next(iter(eager.keys() ^ compiled.keys())))}, which only one of both has,"
    tests = (_sizes_apart, _fixed_apart, _kinds_apart)
    fixed = (
        f"{what} of {' '.join(key)}" for test in tests for key in eager for what in test(eager[key], compiled[key])
    )
    return next(fixed, "") or (_standing_out(eager, compiled, tolerance.absolute, coarser) if eager else "")


def _sizes_apart(eager: Tensor, compiled: Tensor) -> Iterator[str]:
    if eager.shape[1:] != compiled.shape[1:]:
        yield "the size"


def _kinds_apart(eager: Tensor, compiled: Tensor) -> Iterator[str]:
    """Yield what is not finite in samples of one side alone, if in many."""
    for name, test in _NOT_FINITE.items():
        counts = [int(test(side).flatten(1).any(1).sum()) for side in (eager, compiled)]
        if min(counts) == 0 and max(counts) >= _BY_CHANCE:
            yield f"the rate of {name}"


def _fixed_apart(eager: Tensor, compiled: Tensor) -> Iterator[str]:
    """Yield what no seed changes on either side, in some element, and is not the same on both. Of numbers with a
    fraction this is only whether they are finite: the rest may be rounding.
    """
    fixed = {f"the rate of {name}": (test(eager), test(compiled)) for name, test in _NOT_FINITE.items()}
    if not (eager.is_floating_point() or compiled.is_floating_point()):
        fixed["the value"] = eager, compiled
    for what, (one, other) in fixed.items():
        if ((one == one[0]).all(0) & (other == other[0]).all(0) & (one[0] != other[0])).any():
            yield what


def _slopes_apart(
    eager: BuiltProgram, compiled: BuiltProgram, baseline: Baseline, first: int, agree: Callable[[float], float]
) -> str:
    """Name the slope of the loss along its gradients if it differs from eager's; empty if not, or not known."""
    if eager.phase == "inference" or not baseline.eager.starts:
        return ""
    seeds = (range(first + own, first + own + 2 * SLOPES, 2) for own in range(2))
    found = [
        slopes(each, baseline.eager.starts[0], own, _step_from, agree)
        for each, own in zip((eager, compiled), seeds, strict=True)
    ]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return ""
    labels = _labels((SLOPES, SLOPES), PERMUTATIONS, torch.Generator().manual_seed(_PERMUTED))
    statistics = _rms_of_rows(_beyond(torch.cat(known) / (scale_of(known[0]) + _TINY), labels, _SLOPES_ROUNDING))
    return "the slope of the loss along its gradients" if statistics[0] > statistics[1:].max() else ""


def _without_zeros(compiled: Mapping[Key, Tensor], eager: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
    """Return ``compiled`` without gradients that are zero if eager has none, such as those of an unused parameter."""
    return {key: each for key, each in compiled.items() if key in eager or not _is_gradient(key) or each.any()}


def _samples(
    built: BuiltProgram, baseline: Baseline, first: int, agree: Callable[[float], float], places: Places = _NOTHING
) -> list[dict[Key, Tensor]]:
    """Return for each step of the period, of each tensor, one row for each seed; every one from the first state."""
    built = built.restarted()
    start = baseline.eager.starts[0] if baseline.eager.starts else None
    rows: list[dict[Key, list[Tensor]]] = [{} for _ in range(built.program.period)]
    number, wanted = 0, SEEDS
    began = 0.0
    while number < wanted:
        for of_step in rows:
            for key, value in _step_from(built, start, first + 2 * number).items():
                exact = torch.float64 if value.is_floating_point() else value.dtype
                taken = _take(value.flatten(), places.get((key, value.numel())))
                of_step.setdefault(key, []).append(taken.to(exact, copy=True))
        number += 1
        began = began or time.process_time()  # without the compilations of the first step
        if number == FEWEST // 2:
            each = agree((time.process_time() - began) / (number - 1) / torch.get_num_threads())
            wanted = min(SEEDS, max(FEWEST, int(BUDGET_S / max(each, 1e-9))))
    return [{key: _rows_of(each) for key, each in of_step.items() if len(each) == number} for of_step in rows]


def _take(flat: Tensor, places: Tensor | None) -> Tensor:
    """Return a sample of the elements, and those at ``places``."""
    sample = flat[:: max(1, len(flat) // ELEMENTS)][:ELEMENTS]
    return sample if places is None else torch.cat([sample, flat[places]])


def _rows_of(samples: Sequence[Tensor]) -> Tensor:
    """Return a row for each seed: its numbers, or how many, their mean and mean square, if not all have as many."""
    if len({len(each) for each in samples}) == 1:
        return torch.stack([*samples])
    doubles = [each.double() for each in samples]
    numbers = ([each.new_tensor(len(each)), each.mean(), each.square().mean()] for each in doubles)
    return torch.stack([torch.stack(each) for each in numbers])


def _step_from(built: BuiltProgram, start: Snapshot | None, seed: int) -> dict[Key, Tensor]:
    """Return the judged results of the next step, from ``start``."""
    if start is not None:
        start.restore(built)
    tensors = record_step(built, seed).tensors
    return {key: each for key, each in tensors.items() if _is_judged(key) and each.numel()}


def _standing_out(
    eager: Mapping[Key, Tensor],
    compiled: Mapping[Key, Tensor],
    rounding: float,
    coarser: Mapping[Key, float] = _NOTHING,
) -> str:
    """Return the tensor whose statistic is larger for the two groups than for any drawn at random; or nothing.

    Distances up to ``rounding`` do not count; of single elements, only those beyond a tensor's own in ``coarser`` do,
    and of whole numbers all.
    """
    generator = torch.Generator().manual_seed(_PERMUTED)
    pairs = min(len(each) for side in (eager, compiled) for each in side.values())
    moments = _moments({key: torch.cat([eager[key][:pairs], compiled[key][:pairs]]).double() for key in eager}, RELATED)
    labels = _paired_labels(pairs, PERMUTATIONS, generator)
    broad: dict[tuple[Key, str], Tensor] = {}
    narrow: dict[tuple[Key, str], Tensor] = {}
    for (key, what), moment in moments.items():
        broad[key, what] = _rms_of_rows(_beyond(moment, labels, rounding))
        if what == _MEAN:
            least = max(rounding, coarser.get(key, 0.0)) if eager[key].is_floating_point() else 0.0
            varies = (moment[:pairs] - moment[pairs:]).square().mean(0).sqrt()
            narrow[key, f"{what} of some elements"] = (_beyond(moment, labels, least) / (varies + _TINY)).amax(1)
    return _worst(broad) or _worst(narrow)


def _worst(statistics: Mapping[tuple[Key, str], Tensor]) -> str:
    """Name the statistic that is larger, for the true groups, than any of these are for those drawn at random."""
    found = torch.stack([*statistics.values()])
    drawn = found[:, 1:]
    standard = (found - drawn.mean(1, keepdim=True)) / (drawn.std(1, keepdim=True) + 1e-12)
    worst = int(standard[:, 0].argmax())
    (kind, name), what = list(statistics)[worst]
    return f"{what} of {kind} {name}" if standard[worst, 0] > standard[:, 1:].max() else ""


def _moments(values: Mapping[Key, Tensor], most: int) -> dict[tuple[Key, str], Tensor]:
    """Return the moments to average of each tensor, (samples, numbers), in units of its own spread."""
    units = {key: _in_units(torch.where(each.isfinite(), each, torch.nan)) for key, each in values.items()}
    shown = torch.cat([each for key, each in units.items() if not _is_gradient(key)] or [*units.values()], dim=1)
    shown = shown[:, torch.linspace(0, shown.shape[1] - 1, min(most, shown.shape[1])).long()]
    found: dict[tuple[Key, str], Tensor] = {}
    for key, each in units.items():
        found[key, _MEAN] = _centered(each)
        found[key, "the variance"] = _centered(each.square())
        found[key, "the relation to outputs"] = _centered((each[:, :most, None] * shown[:, None, :]).flatten(1))
        found |= {(key, f"the rate of {name}"): test(values[key]).double() for name, test in _NOT_FINITE.items()}
    return found


def _in_units(each: Tensor) -> Tensor:
    """Return the distances from the mean in units of the spread; NaN stands for what is left out."""
    apart = each - each.nanmean(0)
    return apart / (apart.square().nanmean(0).sqrt() + each.abs().nanmean() + _TINY)


def _centered(moment: Tensor) -> Tensor:
    """Return the distances from the mean, which differ between groups as the moment does, with 0 for what is left out:
    it moves neither group.
    """
    return (moment - moment.nanmean(0)).nan_to_num(0.0, 0.0, 0.0)


def _labels(sizes: tuple[int, int], permutations: int, generator: torch.Generator) -> Tensor:
    """Return assignments of samples to the two groups, one a row, as weights of a difference of means: the true one,
    then random ones.
    """
    truly = torch.cat([torch.ones(sizes[0]) / sizes[0], -torch.ones(sizes[1]) / sizes[1]]).double()
    drawn = [truly[torch.randperm(len(truly), generator=generator)] for _ in range(permutations)]
    return torch.stack([truly, *drawn])


def _paired_labels(pairs: int, permutations: int, generator: torch.Generator) -> Tensor:
    """Return the same for as many samples of each group, where those of the same step, which share its inputs, may have
    changed sides.
    """
    signs = 2.0 * torch.randint(2, (permutations, pairs), generator=generator).double() - 1
    signs = torch.cat([torch.ones(1, pairs).double(), signs])
    return torch.cat([signs, -signs], dim=1) / pairs


def _beyond(moment: Tensor, labels: Tensor, rounding: float) -> Tensor:
    """Return for each row of ``labels`` the distances between the groups' means, beyond rounding."""
    return ((labels @ moment).abs() - rounding).clamp_min(0.0)


def _rms_of_rows(apart: Tensor) -> Tensor:
    return apart.square().mean(1).sqrt()


def slopes(
    built: BuiltProgram, start: Snapshot, seeds: Iterable[int], record: Recorded, agree: Callable[[float], float]
) -> Tensor | None:
    """Return, in a row for each seed, the change of the first step's loss along its gradients, as a part of the
    predicted one.

    ``record`` runs a step from a state with a seed. ``None`` if a new beginning would compile the program again, such
    as with a cache of keys of its own, which takes too long. With the same random numbers the loss must change along
    a gradient by the predicted amount, so a gradient whose dropout drew other numbers than the forward shows with few
    seeds. Rounding and curvature move the ratio too, in eager as in compiled code, so the two are compared and
    neither is judged by itself.
    """
    found = []
    try:
        with nothing_compiled():
            for seed in seeds:
                here = record(built.restarted(), start, seed)
                moved, said = _along_gradients(built, start, here)
                # All ranks run what one of them needs: a stage without the loss predicts no change.
                there = record(built.restarted(), moved, seed) if agree(abs(said)) else here
                found.append((_loss(there) - _loss(here)) / said if said else torch.ones((), dtype=torch.float64))
    except Exception as error:
        raise_host_fault(error)
        return None
    return torch.stack(found).nan_to_num().view(-1, 1)


def _along_gradients(built: BuiltProgram, start: Snapshot, here: Mapping[Key, Tensor]) -> tuple[Snapshot, float]:
    """Return a state some way along the gradients, and the change of the loss that they predict for it."""
    moves, said = _moves(built, start, here)
    part = min(_STEP, _STEP * float(_loss(here).abs()) / said) if said else 0.0
    values = (value + part * moves[number] if number in moves else value for number, value in enumerate(start.values))
    return replace(start, values=tuple(values)), part * said


def _moves(built: BuiltProgram, start: Snapshot, here: Mapping[Key, Tensor]) -> tuple[dict[int, Tensor], float]:
    """Return, by its place in ``start``, each parameter moved along its gradient, in proportion to its size,
    and the expected change of the loss. Of a large one only elements with a known gradient move.
    """
    places = {id(member): number for number, member in enumerate(built.members)}
    moves: dict[int, Tensor] = {}
    said = 0.0
    for name, member in built.trainable.items():
        gradient, number = here.get(("gradient", name)), places.get(id(member))
        if gradient is None or number is None or not start.values[number].is_floating_point():
            continue
        value, steep = start.values[number], float(gradient.double().norm())
        if steep > 0:
            large = float(value.double().norm())
            moves[number] = spread(gradient.double() * (large / steep), value).to(value.device, value.dtype)
            said += large * steep
    return moves, said


def _loss(found: Mapping[Key, Tensor]) -> Tensor:
    losses = [value.double().mean() for (kind, _), value in found.items() if kind == "loss"]
    return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
