"""Finds out whether a model has a value at every input of a box: roots, logarithms and quotients do not everywhere.

Bounds hold for real numbers: where there is none they say nothing, and what reads it may seem to be bounded. What is
not found out by its deadline counts as undefined, and is said to be so for want of time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from service.bounds.finite import OwnArithmetic, undefined_nodes
from service.bounds.graph import TESTS
from service.bounds.interval import Interval
from service.bounds.methods import CROWN, IBP, Method
from service.bounds.progress import OutOfTimeError
from service.bounds.rounding import magnitude
from service.verification.bab.specification import Specification
from service.verification.engine import NetworkEngine
from service.verification.engine.base import PLAIN_DOUBLE
from service.verification.task import Task

MOST_BOXES, MOST_NUMBERS = 1024, 2**24
"""Most parts into which boxes are cut, and most numbers of all values in those that are bounded at once."""
NARROWEST = 2.0**-24
"""The width of a box, as a share of the largest number of all, below which it is not cut: rounding would decide."""
FEW = 8
"""Boxes that are bounded by linear functions before they are cut."""


def undefined_in(task: Task, specified: Sequence[Specification], deadline: float) -> str | None:
    """Return in words the first node that may have no value somewhere in the boxes, of a model that this rank has
    whole; by a ``deadline`` (``time.monotonic``), after which the first that is not known to have one.
    """
    boxes = [each.box(torch.float64) for each in specified[: _at_once(task) + 1]]
    whole = Interval(torch.cat([each.lower for each in boxes]), torch.cat([each.upper for each in boxes]))
    if len(specified) > _at_once(task):
        whole = Interval(
            torch.stack([each.lower for each in specified]).amin(dim=0, keepdim=True).to(whole.lower),
            torch.stack([each.upper for each in specified]).amax(dim=0, keepdim=True).to(whole.lower),
        )
    return undefined_within(task, whole, deadline)


def undefined_within(task: Task, boxes: Interval, deadline: float) -> str | None:
    """Return the same of boxes ``(n, features)``.

    It is bounded in float64, in which rounding is far less than how far a box of this size is from a domain's end.
    """
    left, at_once = boxes.map(lambda end: end.to(task.device, torch.float64)), _at_once(task)
    size, engine = magnitude(left).amax(), _in_double(task)
    found = _find_undefined(task, engine, IBP, left)
    done = len(left.lower)
    while found:
        left = _those(left, torch.stack(list(found.values())).any(dim=0))
        if len(left.lower) <= FEW and done <= MOST_BOXES // 2:
            try:
                if not (found := _find_undefined(task, engine, CROWN, left, deadline)):
                    return None
            except OutOfTimeError:
                return f"{_described(task, found)}, for all that its time allowed to find out,"
            left = _those(left, torch.stack(list(found.values())).any(dim=0))
        left = _halves(left)
        done += len(left.lower)
        if done > MOST_BOXES or len(left.lower) > at_once or bool((left.width.amax(dim=1) <= NARROWEST * size).any()):
            return _described(task, found)
        if time.monotonic() > deadline:
            return f"{_described(task, found)}, for all that its time allowed to find out,"
        found = _find_undefined(task, engine, IBP, left)
    return None


def _described(task: Task, found: Mapping[str, Tensor]) -> str:
    node = task.engine.network.graph.by_name[next(iter(found))]
    return f"{(node.source or node.name)!r} ({node.operator})"


def _at_once(task: Task) -> int:
    """Return the most boxes that are bounded at once."""
    return max(1, min(MOST_BOXES, MOST_NUMBERS // task.engine.entries))


OF_A_MESH = (
    "; a question whether a value is a number (IsNaN, IsInf) is settled only where a rank has the whole model: "
    "parallel.tp and parallel.pp of 1 may decide this"
)


def open_tests(task: Task, instance: int) -> str:
    """Return in words the first test whether a value is a number that the bounds of a whole box leave open; empty if
    there is none. All ranks that bound the instance call it: if each has a part of the model, all tests are open.
    """
    graph = task.engine.network.graph
    tests = [node for node in graph.nodes if node.operator in TESTS]
    if not task.engine.is_alone:
        return OF_A_MESH if task.engine.anywhere(bool(tests)) else ""
    if not tests:
        return ""
    box, own = task.engine.shaped(task.asked.batch([instance], task.like).box), OwnArithmetic(graph)
    for node in tests:
        if bool((own.certified(box, node.name).interval.upper > 0).any()):
            return f"; whether {(node.source or node.name)!r} is asked about a number cannot be told in the box"
    return ""


def _in_double(task: Task) -> NetworkEngine:
    network = task.engine.network
    return NetworkEngine(
        replace(network, graph=network.graph.to(task.device, torch.float64)), PLAIN_DOUBLE, task.device
    )


def _find_undefined(
    task: Task, engine: NetworkEngine, method: Method, boxes: Interval, deadline: float = inf
) -> Mapping[str, Tensor]:
    analysis = engine.analyse(method, boxes, task.options if deadline == inf else task.options.until(deadline))
    return undefined_nodes(engine.network.graph, engine.shaped(boxes), analysis.inputs, torch.finfo(task.own_type).max)


def _those(boxes: Interval, chosen: Tensor) -> Interval:
    return boxes.map(lambda end: end[chosen])


def _halves(boxes: Interval) -> Interval:
    """Return both halves of each box, cut where it is widest."""
    widest = (boxes.upper - boxes.lower).argmax(dim=1, keepdim=True)
    middle = (boxes.lower / 2 + boxes.upper / 2).gather(1, widest)
    first, second = boxes.upper.scatter(1, widest, middle), boxes.lower.scatter(1, widest, middle)
    return Interval(torch.cat([boxes.lower, second]), torch.cat([first, boxes.upper]))
