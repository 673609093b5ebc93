"""Takes trees of maxima over entries of one value, such as those of a pool, in one step of a backward pass.

A pool is compared in pairs, and a pass goes through each comparison and each slice. The lines of a maximum weigh its
operands by shares that are not negative and add up to one, and everything else in a tree only moves entries. So a
coefficient keeps its sign down to the value that the tree reads, and its share there is computed once for positive and
once for negative ones. Mostly it lands on one entry, since most comparisons are decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.flat import by_instance, by_row
from service.bounds.fused.lines import propagate_lines_in_steps, weighted
from service.bounds.graph import Node, Ref
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.operators import LINEAR, OPERATORS
from service.bounds.operators.maximum import LinesOfDifference, Maximum
from service.bounds.operators.moves import Concatenate, Expand, Permute, Select, Slice
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxation, Relaxed


@dataclass(frozen=True)
class Tree:
    """``nodes`` in execution order, the last one a maximum, that are computed from ``source`` alone."""

    source: Node
    nodes: tuple[Node, ...]

    @property
    def maxima(self) -> list[str]:
        return [node.name for node in self.nodes if isinstance(OPERATORS[node.operator], Maximum)]


def trees_of(network: Network) -> dict[str, Tree]:
    """Return the largest trees of a network by the names of their last maxima."""
    found, inside = dict[str, Tree](), set[str]()
    for node in reversed(network.graph.nodes):
        if node.name not in inside and _is_comparison(node) and (tree := _tree(network, node)) is not None:
            found[node.name] = tree
            inside.update(tree.maxima)
    return found


def _tree(network: Network, last: Node) -> Tree | None:
    """Return the tree of a maximum: back to a node that is no comparison, or to a comparison with two users,
    whose coefficients may differ in sign.
    """
    nodes, uses = list[Node](), {last.name: torch.ones(1, 1, *last.shape)}
    for node in network.graph.nodes[network.position[last.name] :: -1]:
        if node.name not in uses:
            continue
        is_twice = _is_comparison(node) and uses[node.name].numpy().max() > 1  # counted here, on no device
        if is_twice or not (_is_comparison(node) or _only_moves(node)):
            return Tree(node, tuple(nodes[::-1])) if set(uses) == {node.name} else None
        nodes.append(node)
        for name, count in _uses_before(node, uses.pop(node.name)):
            uses[name] = uses[name] + count if name in uses else count
    return None


def _uses_before(node: Node, uses: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield how often a node uses each entry of its inputs, given its own uses, ``(1, 1, *shape)``."""
    if _is_comparison(node):
        yield from ((name, uses) for name in node.inputs[1:])
        return
    arguments = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in node.arguments.items()}
    step = LINEAR[node.operator].backward(replace(node, arguments=arguments), uses, RankGroup())
    for name, each in zip(node.inputs, step.coefficients, strict=True):
        assert isinstance(each, Tensor)
        yield name, each


def _is_comparison(node: Node) -> bool:
    """Return whether a node is a maximum of two values of its own shape."""
    return isinstance(OPERATORS.get(node.operator), Maximum) and node.input_shapes[1:] == (node.shape, node.shape)


def _only_moves(node: Node) -> bool:
    operator = OPERATORS.get(node.operator)
    if isinstance(operator, Concatenate):
        return all(isinstance(each, Ref) for each in node.arguments["tensors"])
    return operator is not None and (operator.keeps_order or isinstance(operator, Slice | Select | Permute | Expand))


@dataclass(frozen=True, eq=False)
class Leap:
    """A tree as one step, valid while its maxima have these relaxations ``relaxed``.

    A positive coefficient at ``place`` of the last maximum contributes the share ``lower`` ``(batch, count)`` of itself
    at ``entry`` of the source; a negative one ``upper``, and ``above`` ``(batch, entries)`` as well.
    """

    source: Node
    relaxed: Mapping[str, Relaxed]
    place: Tensor
    entry: Tensor
    lower: Tensor
    upper: Tensor
    above: Tensor

    def is_of(self, relaxations: Mapping[str, Relaxed]) -> bool:
        return all(relaxations.get(name) is each for name, each in self.relaxed.items())

    def backward(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients ``(batch, rows, *shape of the source)`` and the bias ``(batch, rows)``."""
        flat, size = by_row(coefficients), (len(self.lower), coefficients.shape[1])
        # Torch gathers and adds along the last of two dimensions several times as fast as along the last of three.
        picked = flat.flatten(0, 1).index_select(1, self.place).reshape(*flat.shape[:2], -1)
        lines = self.lower.unsqueeze(1), self.upper.unsqueeze(1)
        shares, _ = propagate_lines_in_steps(picked.expand(*size, -1), *lines, None, None)
        through = shares.new_zeros(size[0] * size[1], self.source.size)
        through.scatter_add_(1, self.entry.expand(len(through), -1), shares.flatten(0, 1))
        return through.reshape(*size, *self.source.shape), weighted(flat.clamp(max=0), self.above)


@dataclass(frozen=True, eq=False)
class _SharesOfEntries:
    """A value as sums of shares of the source's entries.

    ``entry`` ``(shares, *shape)`` counts them, in float64; ``lower`` and ``upper`` are ``(shares · batch, *shape)``,
    ``above`` is ``(batch, *shape)``.
    """

    entry: Tensor
    lower: Tensor
    upper: Tensor
    above: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        return self.entry, self.lower, self.upper, self.above


def leap_over(network: Network, tree: Tree, relaxations: Mapping[str, Relaxed]) -> Leap | None:
    """Return the step through a tree whose maxima are relaxed; ``None`` if the lines of one differ among rows
    or are not finite.
    """
    relaxed = {name: relaxations[name] for name in tree.maxima}
    lines = {name: each.lines for name, each in relaxed.items() if isinstance(each, LinesOfDifference)}
    plain = {name: each for name, each in lines.items() if isinstance(each, Relaxation)}
    if len(plain) < len(relaxed) or not all(_is_finite(each) for each in plain.values()):
        return None
    forms = {tree.source.name: _identity(tree.source, next(iter(plain.values())).lower_slope)}
    for node in tree.nodes:
        if node.name in plain:
            forms[node.name] = _compared(plain[node.name], forms[node.inputs[1]], forms[node.inputs[2]])
        else:
            forms[node.name] = _move_entries(network, node, [forms[name] for name in node.inputs])
    return _leap(tree.source, relaxed, forms[tree.nodes[-1].name])


def _is_finite(lines: Relaxation) -> bool:
    given = (lines.lower_slope, lines.upper_slope, lines.upper_intercept)
    return lines.lower_intercept is None and all(each is not None and bool(each.isfinite().all()) for each in given)


def _identity(source: Node, like: Tensor) -> _SharesOfEntries:
    entry = torch.arange(source.size, dtype=torch.float64, device=like.device).reshape(1, *source.shape)
    ones = like.new_ones(len(like), *source.shape)
    return _SharesOfEntries(entry, ones, ones, torch.zeros_like(ones))


def _compared(lines: Relaxation, left: _SharesOfEntries, right: _SharesOfEntries) -> _SharesOfEntries:
    assert lines.upper_intercept is not None
    lower, upper = (
        torch.cat([_scaled(left_shares, slope), _scaled(right_shares, 1 - slope)])
        for left_shares, right_shares, slope in (
            (left.lower, right.lower, lines.lower_slope),
            (left.upper, right.upper, lines.upper_slope),
        )
    )
    above = lines.upper_slope * left.above + (1 - lines.upper_slope) * right.above + lines.upper_intercept
    return _SharesOfEntries(torch.cat([left.entry, right.entry]), lower, upper, above)


def _scaled(shares: Tensor, factor: Tensor) -> Tensor:
    return (shares.reshape(-1, *factor.shape) * factor).reshape(shares.shape)


def _move_entries(network: Network, node: Node, forms: list[_SharesOfEntries]) -> _SharesOfEntries:
    most = max(len(form.entry) for form in forms)
    filled = [_filled(form, most) for form in forms]
    entry, lower, upper, above = (
        OPERATORS[node.operator].interval(node, [Interval.point(each) for each in parts], network.tp_group).lower
        for parts in zip(*(form.parts() for form in filled), strict=True)
    )
    return _SharesOfEntries(entry, lower, upper, above)


def _filled(form: _SharesOfEntries, most: int) -> _SharesOfEntries:
    """Return a form padded with empty shares, so that it has as many as others."""
    missing, batch = most - len(form.entry), len(form.above)

    def more(tensor: Tensor, count: int) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(count, *tensor.shape[1:])])

    lower, upper = (more(each, missing * batch) for each in (form.lower, form.upper))
    return _SharesOfEntries(more(form.entry, missing), lower, upper, form.above)


def _leap(source: Node, relaxed: Mapping[str, Relaxed], form: _SharesOfEntries) -> Leap:
    batch, count = len(form.above), len(form.entry)
    lower, upper = (
        each.reshape(count, batch, -1).transpose(0, 1).reshape(batch, -1) for each in (form.lower, form.upper)
    )
    (taken,) = ((lower != 0) | (upper != 0)).any(dim=0).nonzero(as_tuple=True)
    place = taken.remainder(form.above[0].numel())
    entry = form.entry.flatten()[taken].long()
    return Leap(source, relaxed, place, entry, lower[:, taken], upper[:, taken], by_instance(form.above))
