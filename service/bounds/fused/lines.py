"""Propagates coefficients of a pass through lines that bound an operator: one kernel forward, one for all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from operator import gt
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.fused.building import block, flat, kernels_for, strides
from service.bounds.linear.rows.structured import GatheredRows

Optional = Tensor | None
Saved = tuple[Optional, ...]
"""InitialRows, index, parameters; slopes and intercepts, the lower first."""


@dataclass(frozen=True, eq=False)
class FreeSlopes:
    """Lines whose lower slope is free at some entries: of ``(batch, n)`` tensors with one number for each entry.

    ``shape`` is theirs before they were flattened. Rows have parameters ``(batch, rows, places)`` between 0
    and 1, which stand for slopes between ``flattest`` and 1. ``index`` ``(batch, places)`` are their entries, all
    different; ``codes`` ``(batch, n)`` of type int32 is an open entry's place, −2 − place of one that is not open
    although it has a place, else −1.
    """

    shape: tuple[int, ...]
    flattest: float
    index: Tensor
    codes: Tensor
    lower: Tensor
    upper: Tensor
    above: Tensor

    @staticmethod
    def at(open_: Tensor, flattest: float, lower: Tensor, upper: Tensor, above: Tensor) -> FreeSlopes:
        """Make slopes free where ``open_`` ``(batch, *shape)``; each instance has as many places as the one with the
        most needs.
        """
        shape, open_ = tuple(open_.shape[1:]), open_.flatten(1)
        places = int(open_.sum(dim=1).amax())
        index = open_.byte().argsort(dim=1, descending=True, stable=True)[:, :places]
        place = torch.arange(places, device=index.device, dtype=torch.int32).expand_as(index)
        coded = torch.where(open_.gather(1, index), place, -2 - place)
        codes = torch.full_like(open_, -1, dtype=torch.int32).scatter(1, index, coded)
        return FreeSlopes(
            shape, flattest, index, codes, *(each.flatten(1).contiguous() for each in (lower, upper, above))
        )

    def slopes(self, parameters: Tensor) -> Tensor:
        """Return the slopes ``(batch, rows, places)``; the fixed one at a place that is not open."""
        free = parameters * (1 - self.flattest) + self.flattest if self.flattest else parameters
        open_ = self.codes.gather(1, self.index) >= 0
        return torch.where(open_.unsqueeze(1), free, self.lower.gather(1, self.index).unsqueeze(1))


def propagate_lines(
    coefficients: Tensor | GatheredRows, lower: Tensor, upper: Tensor, below: Optional, above: Optional
) -> tuple[Tensor, Optional]:
    """Lead positive coefficients through the lower line, negative ones through the upper (CROWN, Zhang et al., 2018).

    All are ``(batch or 1, rows or 1, *shape)``; the bias is ``(batch, rows)``, absent without intercepts.
    """
    shape, lines = lower.shape[2:], (lower, upper, below, above)
    if not lower.is_cuda:
        return propagate_lines_in_steps(_dense(coefficients, shape, lower), *lines)
    start, index, size = _begun(coefficients)
    given = [each for each in lines if each is not None]
    batch, rows = max(size[0], *map(len, given)), max(size[1], *(each.shape[1] for each in given))
    whole = torch.Size((batch, rows, *shape))
    kernels = kernels_for(start, *lines, entries=whole.numel())
    repeated = any(each.requires_grad and each.shape != whole for each in (start, *given))
    if kernels is None or repeated or start.shape[2:] != (shape if index is None else (shape.numel(),)):
        return propagate_lines_in_steps(_dense(coefficients, shape, lower), *lines)
    flattened = (each if each is None else flat(each.expand(*each.shape[:2], *shape)) for each in lines)
    setting = _LaunchOfLines(kernels, batch, rows)
    through, bias = _through((flat(start), index, None, *flattened), setting)
    return through.reshape(whole), bias


def propagate_lines_in_steps(
    coefficients: Tensor, lower: Tensor, upper: Tensor, below: Optional, above: Optional
) -> tuple[Tensor, Optional]:
    """Compute the same by torch's operators."""
    negative = coefficients.clamp(max=0)
    positive = coefficients - negative
    pieces = [] if above is None else [weighted_rows(negative, above)]
    if below is not None:
        pieces.append(weighted_rows(positive, below))
    bias = sum(pieces[1:], start=pieces[0]) if pieces else None
    # Each slope separately: a difference of slopes would lose the digits of the smaller one.
    # Not by torch's broadcast_shapes, whose first call imports a library of symbols.
    if torch.is_grad_enabled() or any(map(gt, lower.shape, positive.shape)):
        return torch.addcmul(positive * lower, negative, upper), bias
    # In place: on a CPU, new memory takes longer than the arithmetic.
    return positive.mul_(lower).addcmul_(negative, upper), bias


def propagate_bent_lines(
    coefficients: Tensor, lines: tuple[Tensor, Tensor, Optional, Optional], bent: Tensor
) -> tuple[Tensor, Optional]:
    """Compute the same, without gradients, if only the lines of the entries ``bent`` ``(count,)`` differ or have
    intercepts.
    """

    def of_bent(line: Tensor) -> Tensor:
        return line.flatten(2).index_select(2, bent)

    lower, upper, below, above = lines
    # Flat before the product, which keeps the order of memory: permuted, a flat result would be a copy.
    through = coefficients.flatten(2) * lower.flatten(2)
    intercepts = (each if each is None else of_bent(each) for each in (below, above))
    part, bias = propagate_lines_in_steps(of_bent(coefficients), of_bent(lower), of_bent(upper), *intercepts)
    through.index_copy_(2, bent, part)
    return through.reshape(*through.shape[:2], *coefficients.shape[2:]), bias


def propagate_free_slopes(
    coefficients: Tensor | GatheredRows, free: FreeSlopes, parameters: Tensor
) -> tuple[Tensor, Tensor]:
    """Propagate ``(batch or 1, rows, *shape)`` or rows of a matrix, through the lines that ``parameters`` choose."""
    start, index, size = _begun(coefficients)
    whole = (len(free.lower), size[1])
    kernels = kernels_for(start, free.lower, parameters, entries=free.lower.numel() * size[1])
    repeated = parameters.shape[:2] != whole or (start.requires_grad and start.shape[:2] != whole)
    exact = start.dtype == torch.float32 or free.flattest in {0.0, -1.0}
    if kernels is None or repeated or not exact:
        return _propagate_free_slopes_in_steps(_dense(coefficients, free.shape, parameters), free, parameters)
    setting = _LaunchOfLines(kernels, *whole, free)
    lines = (free.lower.unsqueeze(1), free.upper.unsqueeze(1), None, free.above.unsqueeze(1))
    through, bias = _through((flat(start), index, parameters.contiguous(), *lines), setting)
    assert bias is not None
    return through.reshape(*whole, *free.shape), bias


def _begun(coefficients: Tensor | GatheredRows) -> tuple[Tensor, Optional, tuple[int, int]]:
    """Return the matrix that a kernel reads, the index of its rows, if any, and the numbers of instances and rows."""
    if isinstance(coefficients, Tensor):
        return coefficients, None, (coefficients.shape[0], coefficients.shape[1])
    index = coefficients.index.contiguous()
    return coefficients.matrix.contiguous().unsqueeze(0), index, (len(index), coefficients.count)


def _dense(coefficients: Tensor | GatheredRows, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return coefficients if isinstance(coefficients, Tensor) else coefficients.dense(shape, like)


def _propagate_free_slopes_in_steps(
    coefficients: Tensor, free: FreeSlopes, parameters: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the same by torch's operators."""
    entries = coefficients.flatten(2)
    batch, rows = len(free.lower), entries.shape[1]
    if batch == 1:
        index = free.index[0]
        picked = entries.index_select(2, index)
    else:
        places = free.index.unsqueeze(1).expand(-1, rows, -1)
        entries = entries.expand(batch, -1, -1)
        picked = entries.gather(2, places)
    negative = picked.clamp(max=0)
    upper, above = (each.gather(1, free.index) for each in (free.upper, free.above))
    bent = torch.addcmul((picked - negative) * free.slopes(parameters), negative, upper.unsqueeze(1))
    fixed = entries * free.lower.unsqueeze(1)
    through = fixed.index_copy(2, index, bent) if batch == 1 else fixed.scatter(2, places, bent)
    return through.reshape(*through.shape[:2], *coefficients.shape[2:]), weighted(negative, above)


@dataclass(frozen=True, eq=False)
class _LaunchOfLines:
    kernels: ModuleType
    batch: int
    rows: int
    free: FreeSlopes | None = None


def _through(saved: Saved, setting: _LaunchOfLines) -> tuple[Tensor, Optional]:
    """Propagate, with a gradient only if needed: autograd's own work takes longer than a small kernel."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in saved):
        found: tuple[Tensor, Optional] = _PropagateLines.apply(*saved, setting)  # type: ignore[no-untyped-call]
        return found
    return _forward(saved, setting)


def _forward(saved: Saved, setting: _LaunchOfLines) -> tuple[Tensor, Optional]:
    a, _, _, _, _, below, above = saved
    assert a is not None
    batch, rows, n = setting.batch, setting.rows, a.shape[2]
    out = a.new_empty(batch, rows, n)
    bias = None if below is None and above is None else a.new_empty(batch, rows)
    pointers, numbers, flags = _arguments(saved, setting)
    if out.numel():
        setting.kernels.forward_lines[(batch * rows,)](*pointers, out, bias, *numbers, **flags, **block(n))
    return out, bias


class _PropagateLines(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - what autograd passes has no names
        ctx: Any,
        a: Tensor,
        index: Optional,
        parameters: Optional,
        lower: Tensor,
        upper: Tensor,
        below: Optional,
        above: Optional,
        setting: _LaunchOfLines,
    ) -> tuple[Tensor, Optional]:
        ctx.setting = setting
        given = (a, index, parameters, lower, upper, below, above)
        ctx.save_for_backward(*given)
        return _forward(given, setting)

    @staticmethod
    def backward(ctx: Any, onto: Tensor, onto_bias: Optional) -> tuple[Optional, ...]:
        setting, saved = ctx.setting, ctx.saved_tensors
        pointers, numbers, flags = _arguments(saved, setting)
        wanted = dict(zip(NAMES, ctx.needs_input_grad, strict=False))
        onto = onto.contiguous()
        found = {
            name: torch.empty_like(onto) if wanted[name] else None for name in ("a", "lower", "upper", "below", "above")
        }
        parameters = saved[2]
        found["parameters"] = None if parameters is None else torch.empty_like(parameters)
        given = None if onto_bias is None else onto_bias.contiguous()
        gradients = [found[name] for name in ("a", "lower", "upper", "below", "above", "parameters")]
        onto_each = {
            f"TO_{name.upper()}": found[name] is not None for name in ("a", "lower", "upper", "below", "above")
        }
        if onto.numel():
            setting.kernels.backward_lines[(setting.batch * setting.rows,)](
                *pointers, onto, given, *gradients, *numbers, **flags, **onto_each, **block(onto.shape[2])
            )
        return (*(found.get(name) for name in NAMES), None)


NAMES = ("a", "index", "parameters", "lower", "upper", "below", "above")


def _arguments(saved: Saved, setting: _LaunchOfLines) -> tuple[list[Any], list[Any], dict[str, bool]]:
    """Return the arguments of both kernels: tensors, numbers and strides, flags."""
    a, index, parameters, lower, upper, below, above = saved
    assert a is not None
    free = setting.free
    codes = None if free is None else free.codes
    pairs = 0 if index is None else index.shape[1]
    frees = 0 if parameters is None else parameters.shape[2]
    flattest = 0.0 if free is None else free.flattest
    index_batch = index.stride(0) if index is not None and len(index) > 1 else 0
    numbers = [a.shape[2], setting.rows, pairs, frees, flattest, *strides(a), index_batch]
    for each in (lower, upper, below, above):
        numbers += (0, 0) if each is None else strides(each)
    flags = {"INDEXED": index is not None, "FREE": free is not None, "BELOW": below is not None}
    return [a, index, lower, upper, below, above, parameters, codes], numbers, {**flags, "ABOVE": above is not None}


def weighted_rows(coefficients: Tensor, intercept: Tensor) -> Tensor:
    """Sum products of ``(b, rows, *shape)`` and ``(batch, rows or 1, *shape)`` to ``(batch, rows)``."""
    if intercept.shape[1] == 1:
        return weighted(coefficients, intercept.squeeze(1))
    return by_row(coefficients * intercept).sum(dim=2)


def weighted(coefficients: Tensor, intercept: Tensor) -> Tensor:
    """Sum products of ``(b, rows, *shape)`` and ``(batch, *shape)`` to ``(batch, rows)``."""
    return (by_row(coefficients) @ intercept.reshape(intercept.shape[0], -1, 1)).squeeze(-1)
