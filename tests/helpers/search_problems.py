"""Small search problems: models, specifications and domains, and what is exactly true of them."""

from __future__ import annotations

import threading
import time
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from nets import Residual, mlp, redraw
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import CROWN, METHODS, BoundOptions, Method
from service.bounds.network import Network, prepare
from service.bounds.split import Preactivations, breakpoint_of
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DisjunctRows, DualObjective
from service.verification.bab.activations.search import begin_splitting_activations
from service.verification.bab.decision import ProgressListener, SearchProgress, SearchResult, SearchTask
from service.verification.bab.inputs.search import begin_splitting_inputs
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification, specifications
from service.verification.engine import NetworkEngine

Problem = tuple[ModelUnderVerification, Specification, Method, float, ProgressListener]
"""What a search takes; the number is its deadline."""


def tick(patch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock take a second: a busy machine then gets as far as an idle one.

    Other threads, as servers of other tests have them, look at a clock of their own.
    """
    real, searching, ticks = time.monotonic, threading.get_ident(), count(0.0)
    patch.setattr(time, "monotonic", lambda: next(ticks) if threading.get_ident() == searching else real())


class Gate(nn.Module):
    """A product of two hidden values: an operator with two inputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)
        redraw(self, torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * torch.sigmoid(self.second(x)))


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def convolutional(seed: int) -> nn.Sequential:
    """A convolution, a residual block, a head; of three inputs."""
    net = nn.Sequential(
        nn.Linear(3, 16),
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        Residual(32, nn.ReLU()),
        nn.ReLU(),
        nn.Linear(32, 2),
    )
    redraw(net, torch.Generator().manual_seed(seed))
    return net


NETS = {
    "relu": lambda seed: mlp([3, 8, 8, 2], nn.ReLU(), seed),
    "leaky": lambda seed: mlp([3, 8, 8, 2], nn.LeakyReLU(0.1), seed),
    "abs": lambda seed: mlp([3, 8, 8, 2], Magnitude(), seed, 0.7),
    "tanh": lambda seed: mlp([3, 8, 8, 2], nn.Tanh(), seed, 2.5),
    "convolutional": convolutional,
    "gate": Gate,
}


def model_from(module: nn.Module, inputs: int) -> ModelUnderVerification:
    module = module.double().eval().requires_grad_(False)
    return ModelUnderVerification(module, NetworkEngine(prepare(module, (inputs,))), module, None, torch.float64)


@lru_cache
def model_named(name: str, seed: int) -> ModelUnderVerification:
    return model_from(NETS[name](seed), 3)


def specification_of(
    lower: Tensor, upper: Tensor, rows: Tensor, thresholds: list[float], disjunct: list[int]
) -> Specification:
    """``disjunct`` numbers the disjunct of each row."""
    halfspaces: list[list[Halfspace]] = [[] for _ in range(max(disjunct) + 1)]
    for row, threshold, index in zip(rows.tolist(), thresholds, disjunct, strict=True):
        halfspaces[index].append(Halfspace(tuple(enumerate(row)), threshold))
    ends = tuple(lower.tolist()), tuple(upper.tolist())
    cases = tuple(Disjunct(*ends, tuple(each)) for each in halfspaces)
    (goal,) = specifications(Query(len(lower), rows.shape[1], cases), torch.device("cpu"))
    return goal


def bounding_of(subject: ModelUnderVerification, lower: Tensor, upper: Tensor, rows: Tensor) -> DomainBounds:
    """One disjunct of all ``rows``, without margins."""
    box = Interval(lower[None], upper[None])
    analysis = METHODS["crown"](subject.network, box, BoundOptions())
    bounds = Preactivations.of(subject.network).bounds(analysis.inputs)
    specification_rows = DisjunctRows(
        subject.network.graph.output.name,
        rows[None],
        rows.new_zeros(1, len(rows)),
        torch.ones(1, len(rows), dtype=torch.bool),
    )
    return DomainBounds(DualObjective(subject.network, box, bounds, specification_rows))


def evaluated(network: Network, x: Tensor) -> dict[str, Tensor]:
    """The network's values at inputs ``(n, *input shape)``, by node."""
    known = {network.graph.input.name: Interval.point(x)}
    for node in network.graph.nodes[1:]:
        known[node.name] = Interval.point(network.interval(node, known).centre)
    return {name: each.centre for name, each in known.items()}


def random_domains(domain_bounds: DomainBounds, count: int, depth: int, generator: torch.Generator) -> Domains:
    """Splits at random entries: at kinks, or anywhere in the entry's interval where there is none."""
    root = domain_bounds.roots(torch.full((1, len(_only_rows(domain_bounds))), -torch.inf, dtype=torch.float64))
    index = torch.randint(domain_bounds.preactivations.entries, (count, depth), generator=generator)
    sign = torch.randint(2, (count, depth), generator=generator).double() * 2 - 1
    share = torch.rand(count, depth, generator=generator, dtype=torch.float64)
    lower, upper = domain_bounds.bounds.lower[0][index], domain_bounds.bounds.upper[0][index]
    kinked = torch.cat(
        [
            torch.full((preactivation.size,), breakpoint_of(domain_bounds.network, preactivation) is not None)
            for preactivation in domain_bounds.preactivations.each
        ]
    )
    at = torch.where(kinked[index], torch.zeros_like(share), lower + share * (upper - lower))
    sign = torch.where((lower <= at) & (at <= upper), sign, 0.0)
    beta = 2 * torch.randn(count, depth, generator=generator, dtype=torch.float64)
    many = root.repeat(count)
    slopes = torch.rand(many.slopes.shape, generator=generator, dtype=torch.float64)
    weights = torch.rand(many.weights.shape, generator=generator, dtype=torch.float64) + 0.01
    return many.with_(index=index, sign=sign, at=at, beta=beta, slopes=slopes, weights=weights)


def _only_rows(domain_bounds: DomainBounds) -> Tensor:
    """The rows of the only disjunct, ``(rows, outputs)``."""
    rows, _, _ = domain_bounds.specification_rows.of(torch.zeros(1, dtype=torch.int64))
    return rows[0]


def least_sampled(domain_bounds: DomainBounds, domains: Domains, points: int, generator: torch.Generator) -> Tensor:
    """The least of the combined rows over random inputs that satisfy the splits, +inf without any."""
    lower, upper = domain_bounds.box.lower, domain_bounds.box.upper
    x = lower + torch.rand(points, *lower.shape[1:], generator=generator, dtype=torch.float64) * (upper - lower)
    values = evaluated(domain_bounds.network, x)
    hidden = domain_bounds.preactivations.flattened(
        {preactivation.value: values[preactivation.value] for preactivation in domain_bounds.preactivations.each}
    )
    outputs = values[domain_bounds.network.graph.output.name] @ _only_rows(domain_bounds).T
    weights = domains.weights / domains.weights.sum(dim=1, keepdim=True)
    found = []
    for own in range(len(domains)):
        held = (domains.sign[own] * (hidden[:, domains.index[own]] - domains.at[own]) >= 0).all(dim=1)
        found.append((outputs[held] @ weights[own]).min() if bool(held.any()) else torch.tensor(torch.inf).double())
    return torch.stack(found)


def exact_minimum(net: nn.Sequential, lower: Tensor, upper: Tensor, row: Tensor, slope: float = 0.0) -> float:
    """By a mixed-integer program over the network's equations: nothing in common with the code under test."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    sizes = [len(lower)]
    for layer in layers[:-1]:
        sizes += [layer.out_features] * 3  # z, its activation, and a binary each
    starts = np.concatenate([[0], np.cumsum(sizes)])
    count, big = int(starts[-1]), 1e3
    low, high, whole = np.full(count, -big), np.full(count, big), np.zeros(count)
    low[: len(lower)], high[: len(lower)] = lower.numpy(), upper.numpy()
    matrix, least, most = [], [], []

    def add(entries: dict[int, float], from_: float, to: float) -> None:
        line = np.zeros(count)
        for place, factor in entries.items():
            line[place] += factor
        matrix.append(line)
        least.append(from_)
        most.append(to)

    before = 0
    reach = max(abs(float(lower.min())), abs(float(upper.max())), 1.0)
    for number, layer in enumerate(layers[:-1]):
        z, a, b = (int(starts[1 + 3 * number + part]) for part in range(3))
        reach = reach * float(layer.weight.abs().sum(dim=1).max()) + float(layer.bias.abs().max())
        whole[b : b + layer.out_features], low[b : b + layer.out_features] = 1, 0
        high[b : b + layer.out_features] = 1
        for out in range(layer.out_features):
            terms = {before + place: -float(factor) for place, factor in enumerate(layer.weight[out])}
            add({z + out: 1.0, **terms}, float(layer.bias[out]), float(layer.bias[out]))
            add({a + out: 1, z + out: -1}, 0, np.inf)
            add({a + out: 1, z + out: -slope}, 0, np.inf)
            add({a + out: 1, z + out: -1, b + out: reach}, -np.inf, reach)
            add({a + out: 1, z + out: -slope, b + out: -reach}, -np.inf, 0)
        before = a
    last = layers[-1]
    cost = np.zeros(count)
    cost[before : before + last.in_features] = (row @ last.weight).numpy()
    constraints = LinearConstraint(np.array(matrix), np.array(least), np.array(most))
    result = milp(cost, constraints=constraints, integrality=whole, bounds=Bounds(low, high))
    assert result.status == 0, result.message
    return float(result.fun) + float(row @ last.bias)


def ignored(moment: SearchProgress) -> None:
    pass


def split_inputs(*problem: *Problem) -> SearchResult:
    """Search until the deadline."""
    return begin_splitting_inputs(SearchTask(*problem)).run(problem[3])


def split_activations(*problem: *Problem) -> SearchResult:
    """Search until the deadline."""
    return begin_splitting_activations(SearchTask(*problem)).run(problem[3])


def searched(
    subject: ModelUnderVerification, goal: Specification, seconds: float = 300.0, method: Method = CROWN
) -> tuple[SearchResult, list[SearchProgress]]:
    heard: list[SearchProgress] = []
    finding = split_activations(subject, goal, method, time.monotonic() + seconds, heard.append)
    return finding, heard


def goal_above(module: nn.Module, features: int, share: float, radius: float) -> Any:
    """Is the first output ever more than so much above the largest of many samples, in units of its spread?"""
    from service.formats.vnnlib import Disjunct, Halfspace, Query
    from service.verification.bab.specification import specifications

    x = radius * (2 * torch.rand(20000, features, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1)
    y = module(x)[:, 0]
    threshold = y.max() + share * (y.max() - y.min())
    case = Disjunct((-radius,) * features, (radius,) * features, (Halfspace(((0, -1.0),), -float(threshold)),))
    (goal,) = specifications(Query(features, module(x[:1]).shape[1], (case,)), torch.device("cpu"))
    return goal


def bounding_and_batches(name: str, batches: list[tuple[int, int]]) -> tuple[DomainBounds, list[Domains]]:
    generator = torch.Generator().manual_seed(7)
    centre = torch.zeros(3, dtype=torch.float64)
    rows = torch.tensor([[1.0, -1.0], [-0.5, 1.0]], dtype=torch.float64)
    domain_bounds = bounding_of(model_named(name, 3), centre - 1, centre + 1, rows)
    domain_bounds.calibrate(domain_bounds.roots(torch.zeros(1, 2, dtype=torch.float64)))
    return domain_bounds, [random_domains(domain_bounds, count, depth, generator) for count, depth in batches]


def specification_of_cases(
    lower: list[float], upper: list[float], *cases: list[tuple[dict[int, float], float]]
) -> Specification:
    """Return a specification of one box; each case is a list of rows with their thresholds."""
    disjuncts = tuple(
        Disjunct(tuple(lower), tuple(upper), tuple(Halfspace(tuple(row.items()), threshold) for row, threshold in case))
        for case in cases
    )
    (specification,) = specifications(Query(len(lower), 2, disjuncts), torch.device("cpu"))
    return specification
