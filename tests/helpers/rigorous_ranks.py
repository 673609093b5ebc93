"""Rigorous bounds and searches on several ranks, compared with rational numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.methods import CROWN

LOOSER = 1e-6
"""What the mesh may add to the widths of one process, as a share of them."""


Exact = Callable[[Any], Any]
"""A network over arrays of rational numbers."""


def rational(tensor: Tensor) -> Any:
    flat = [Fraction(entry) for entry in tensor.flatten().tolist()]
    return np.array(flat, dtype=object).reshape(tuple(tensor.shape))


def positive(x: Any) -> Any:
    return np.where(x > 0, x, np.array(Fraction(0), dtype=object))


def mlps(mesh: Any, *hidden: int) -> tuple[nn.Module, nn.Module, Exact, tuple[int, ...]]:
    from service.jobs.spec.model import MlpConfig
    from service.models import build

    config = MlpConfig(in_features=4, hidden=hidden, out_features=2)
    whole, divided = (build(config, each, dtype=torch.float64, seed=3) for each in (None, mesh))
    with torch.no_grad():
        for parameter in (*whole.parameters(), *divided.parameters()):
            parameter.mul_(30)

    def exactly(x: Any) -> Any:
        values = [rational(each) for each in whole.parameters()]
        for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
            x = positive(weight @ x + bias)
        return values[-2] @ x + values[-1]

    return whole, divided, exactly, (4,)


def bounds_of(network: Any, box: Any, method: str) -> Tensor:
    """``(2, outputs)``: lower ones, and upper ones."""
    from rigorous_problems import both_sides

    from service.bounds.methods import METHODS, BoundOptions
    from service.bounds.optimise import Ascent

    output = network.graph.output
    rows = both_sides(output.size).reshape(1, -1, *output.shape)
    options = BoundOptions(elements=2**14, ascent=Ascent(iterations=4))
    lower, negated = METHODS[method].rigorous(network, box, options).lower_bounds(rows)[0].chunk(2)
    return torch.stack([lower, -negated])


def outside(bounds: Tensor, exact: Exact, points: Iterable[Tensor]) -> int:
    """How often an exact value leaves the bounds."""
    lower, upper = (rational(each) for each in bounds)
    values = [exact(rational(point)).reshape(-1) for point in points]
    return int(sum((value < lower).sum() + (value > upper).sum() for value in values))


def above_values(slopes: Tensor, constants: Tensor, exact: Exact, points: Iterable[Tensor]) -> int:
    """How often planes are not below the exact values, and their negations, that they are for."""
    found = 0
    for point in points:
        value = exact(rational(point)).reshape(-1)
        plane = rational(slopes) @ rational(point.flatten()) + rational(constants)
        found += int((plane > np.concatenate([value, -value])).sum())
    return found


def searches(divided: Callable[[Any], Any], *splits: str) -> dict[str, list[str]]:
    """Verdicts by splits of inputs or of activations, for graphs that are ``divided``; the last are not rigorous."""
    from unittest.mock import patch

    from nets import mlp
    from rigorous_problems import above, vanishing

    from service.bounds.capture import capture
    from service.formats.vnnlib import Disjunct, Halfspace, Query
    from service.verification.bab.decision import Technique
    from service.verification.bab.driver import decide
    from service.verification.bab.settings import ActivationSearchSettings, OptimiserSettings, SearchSettings
    from service.verification.engine import PLAIN, NetworkEngine, StagesEngine

    net = mlp([4, 9, 10, 2], nn.ReLU(), 1, scale=2.0).double().eval().requires_grad_(False)
    x = 2 * torch.rand(4000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    least, most = net(x).amin(dim=0), net(x).amax(dim=0)
    # Over the rational numbers y = 1 at x = 1, but its two terms, which ranks have, are the same when rounded.
    reached = Query(1, 1, (Disjunct((0.5,), (1.0,), (Halfspace(((0, -1.0),), -0.5),)),))
    subject, cancelling = (
        divided(capture(each, (features,))) for each, features in ((net, 4), (vanishing(27).requires_grad_(False), 1))
    )
    engine = cancelling.engine
    plain = NetworkEngine(engine.network, PLAIN) if engine.stages is None else StagesEngine(engine.stages, PLAIN)
    cases = {
        "verified": (subject, above(4, 1.0, *(most + 0.2 * (most - least)).tolist()), 600.0),
        "falsified": (subject, above(4, 1.0, *(most - 0.05 * (most - least)).tolist()), 600.0),
        "open": (cancelling, reached, 0.5),
        "wrong": (replace(cancelling, engine=plain), reached, 600.0),
    }
    # Each step goes through all ranks.
    few_steps = SearchSettings(activations=ActivationSearchSettings(from_scratch=OptimiserSettings(15, slope_step=0.1)))
    found: dict[str, list[str]] = {}
    for means in (Technique[each] for each in splits):
        with patch("service.verification.bab.driver.technique_for", lambda *_, means=means: means):
            for name, (each, query, limit) in cases.items():
                decision = decide(replace(each, settings=few_steps), query, CROWN, limit, restarts=0)
                assert decision.technique is means
                found.setdefault(name, []).append(decision.verdict.value)
    return found


def check_searches(found: dict[str, list[str]]) -> None:
    assert set(found["verified"]) == {"verified"}
    assert set(found["falsified"]) == {"falsified"}
    assert set(found["wrong"]) == {"verified"}, "a plain search must be wrong there"
    assert "verified" not in found["open"]
