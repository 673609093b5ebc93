"""Linear bounds of one non-linear operator, and the step of a backward pass through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from service.bounds import fused
from service.bounds.linear.propagation import BackwardRules, Coefficients, Propagated, backward_rule
from service.bounds.linear.rows.block import Block, BlockRows, enclosing, in_block
from service.bounds.linear.rows.patches import Patches
from service.bounds.linear.rows.structured import GatheredRows

LONG, FEW = 2**18, 0.25
"""Coefficients on a CPU from which entries with two lines are taken apart from others, and the share up to which."""


def _is_taken_apart(coefficients: Tensor) -> bool:
    return coefficients.numel() >= LONG and not coefficients.is_cuda and not torch.is_grad_enabled()


class Relaxed(BackwardRules, ABC):
    """An operator that was relaxed on its inputs' bounds.

    If it ``reaches_deciding``, its coefficients on inputs that only decide may be other than 0.
    """

    reaches_deciding: ClassVar[bool] = False

    @abstractmethod
    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return coefficients on each input, and the bias ``(batch, rows)``, that bound ``coefficients · f`` below.

        ``coefficients`` is ``(batch or 1, rows, *shape of the output)``.
        """

    def within(self, block: Block) -> tuple[Relaxed, tuple[Block, ...]] | None:
        """Return the same for a block of the operator's output, and the blocks of its inputs that matter there;
        ``None`` if only the whole is known.
        """
        return None

    @backward_rule(BlockRows)
    def backward_block(self, rows: BlockRows) -> Propagated | None:
        part = self.within(rows.block)
        if part is None:
            return None
        coefficients, bias = part[0].backward(rows.values)
        found = zip(coefficients, part[1], strict=True)
        return Propagated(tuple(BlockRows(values, block) for values, block in found), bias)

    def propagate_backward(self, rows: Coefficients) -> Propagated | None:
        """Return the step of rows in any representation; ``None`` if they must be made dense first."""
        if isinstance(rows, Tensor):
            return Propagated(*self.backward(rows))
        rule = self.backward_rules.get(type(rows))
        return None if rule is None else rule(self, rows)


@dataclass(frozen=True, eq=False)
class RigorousStep:
    """A step backward through a node: ``|A|·error + lost`` bounds its error.

    ``error`` is ``(batch, rows or 1, *shape)``, ``lost`` ``(batch,)``; ``relaxed`` is there for non-linear nodes.
    """

    error: Tensor
    lost: Tensor
    relaxed: Relaxed | None = None


class Family(Protocol):
    """All relaxations of one operator on fixed bounds that an optimiser may choose from.

    A member is named by parameters between 0 and 1, every one of which is sound. ``start`` has their values for
    the member that CROWN takes, each ``(batch, *any)``; it is empty if there is nothing to choose.
    """

    @property
    def start(self) -> tuple[Tensor, ...]:
        """Return the parameters of CROWN's member."""

    def member(self, parameters: tuple[Tensor, ...]) -> Relaxed:
        """Return the member of parameters ``(batch, rows or 1, *any)``, whose results are differentiable in them."""


@runtime_checkable
class PatchFamily(Protocol):
    """A family that also exists for the entries in patches of its operator."""

    def shown(self, patches: Patches) -> Family:
        """Return the family of the patches: ``start`` is then ``(batch, rows, *shape of a patch)``, and members take
        the patches' values.
        """


@dataclass(frozen=True, eq=False)
class Single:
    """A family of one."""

    relaxed: Relaxed
    start: tuple[Tensor, ...] = ()

    def member(self, parameters: tuple[Tensor, ...]) -> Relaxed:
        return self.relaxed


@dataclass(frozen=True, eq=False)
class Changed:
    """A family each of whose members is changed alike."""

    family: Family
    change: Callable[[Relaxed], Relaxed]

    @property
    def start(self) -> tuple[Tensor, ...]:
        return self.family.start

    def member(self, parameters: tuple[Tensor, ...]) -> Relaxed:
        return self.change(self.family.member(parameters))


@dataclass(frozen=True, eq=False)
class Lines(Relaxed):
    """``lower_slope·z + lower_intercept ≤ f(z) ≤ upper_slope·z + upper_intercept``, with lines for each row.

    All tensors are ``(batch, rows or 1, *shape)`` of the operator's input; an intercept of ``None`` is zero.
    """

    lower_slope: Tensor
    upper_slope: Tensor
    lower_intercept: Tensor | None = None
    upper_intercept: Tensor | None = None

    def backward(self, coefficients: Tensor | GatheredRows) -> tuple[tuple[Tensor, ...], Tensor | None]:
        lines = self.lower_slope, self.upper_slope, self.lower_intercept, self.upper_intercept
        through, bias = fused.propagate_lines(coefficients, *lines)
        return (through,), bias


@dataclass(frozen=True, eq=False)
class Relaxation(Relaxed):
    """Lines that are the same for every row: tensors ``(batch, *shape)``."""

    lower_slope: Tensor
    upper_slope: Tensor
    lower_intercept: Tensor | None = None
    upper_intercept: Tensor | None = None

    def backward(self, coefficients: Tensor | GatheredRows) -> tuple[tuple[Tensor, ...], Tensor | None]:
        below, above = (
            None if each is None else each.unsqueeze(1) for each in (self.lower_intercept, self.upper_intercept)
        )
        lines = self.lower_slope.unsqueeze(1), self.upper_slope.unsqueeze(1), below, above
        if isinstance(coefficients, Tensor) and _is_taken_apart(coefficients) and self._bent is not None:
            through, bias = fused.propagate_bent_lines(coefficients, lines, self._bent)
        else:
            through, bias = fused.propagate_lines(coefficients, *lines)
        return (through,), bias

    @cached_property
    def _bent(self) -> Tensor | None:
        """Return the entries at which the lines differ or have intercepts, ``(count,)``; ``None`` if they are not few.

        At all others, such as those of a ReLU whose sign is known, the operator is one multiplication.
        """
        found = self.lower_slope - self.upper_slope != 0  # so is the difference of two infinite ones
        for intercept in (self.lower_intercept, self.upper_intercept):
            if intercept is not None:
                found |= intercept != 0
        bent = found.flatten(1).any(dim=0).nonzero().squeeze(1)
        return bent if len(bent) <= FEW * found[0].numel() else None

    def within(self, block: Block) -> tuple[Relaxed, tuple[Block, ...]]:
        lower, upper = self.lower_intercept, self.upper_intercept
        part = Relaxation(
            in_block(self.lower_slope, block),
            in_block(self.upper_slope, block),
            None if lower is None else in_block(lower, block),
            None if upper is None else in_block(upper, block),
        )
        return part, (block if self._passing is None else enclosing(self._passing, block),)

    @backward_rule(BlockRows)
    def backward_block(self, rows: BlockRows) -> Propagated:
        part, (block,) = self.within(rows.block)
        (values,), bias = part.backward(rows.values)
        through = replace(rows, values=values)
        return Propagated((through if block == rows.block else through.cut(block),), bias)

    @cached_property
    def _passing(self) -> Tensor | None:
        """Return which entries pass coefficients on, bool ``(*shape)`` on the host; ``None`` if all do. The others'
        slopes are 0, such as behind a mask of scores.
        """
        slopes = self.lower_slope, self.upper_slope
        found = torch.stack([(each != 0).any(dim=0) for each in slopes]).any(dim=0).cpu()
        return None if bool(found.all()) else found

    @backward_rule(GatheredRows)
    def backward_gathered(self, rows: GatheredRows) -> Propagated:
        return Propagated(*self.backward(rows))

    @backward_rule(Patches)
    def backward_patches(self, patches: Patches) -> Propagated:
        lines = self.lower_slope, self.upper_slope, self.lower_intercept, self.upper_intercept
        found = fused.propagate_patches(patches.values, patches.place, patches.moves, lines)
        if found is not None:
            return Propagated((replace(patches, values=found[0], inside=True),), found[1])
        shown = iter(patches.of_each(*(each for each in lines if each is not None)))
        lower, upper = next(shown), next(shown)
        below, above = (each if each is None else next(shown) for each in lines[2:])
        values, bias = fused.propagate_lines(patches.values, lower, upper, below, above)
        return Propagated((replace(patches, values=values, inside=True),), bias)
