"""A search proves what α-CROWN proves, and says where its time did not suffice for that."""

from __future__ import annotations

import time

import pytest
import torch
from nets import mlp
from rigorous_problems import subject
from search_problems import bounding_of, model_from, specification_of
from torch import nn
from verify_jobs import context, robustness, specification

from service.bounds.interval import Interval
from service.bounds.methods import ALPHA_CROWN, BETA_CROWN, CROWN, BoundOptions
from service.bounds.split import Preactivations
from service.jobs.files import DataLayout
from service.verification import job
from service.verification.bab.activations.dual_objective import DisjunctRows
from service.verification.bab.activations.intermediate_bounds import bound_root
from service.verification.bab.activations.shared_bounds import SharedBounds
from service.verification.bab.time_plan import TimePlan

ROWS = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
LOWER, UPPER = torch.full((3,), -1.0, dtype=torch.float64), torch.full((3,), 1.0, dtype=torch.float64)
NET = mlp([3, 16, 16, 16, 2], nn.ReLU(), 0)


def test_a_search_optimises_what_its_domains_share_beyond_its_turn() -> None:
    model = model_from(NET, 3)
    domain_bounds, box = bounding_of(model, LOWER, UPPER, ROWS), Interval(LOWER[None], UPPER[None])
    now = time.monotonic()
    rows = domain_bounds.specification_rows
    assert isinstance(rows, DisjunctRows)
    shared = SharedBounds(model, domain_bounds, rows, domain_bounds.bounds, now + 1000)
    found = shared.tighter(1.0, now)
    optimised = ALPHA_CROWN(model.network, box, BoundOptions())
    alpha = Preactivations.of(model.network).bounds(optimised.inputs)
    assert float(alpha.width.sum()) < 0.99 * float(domain_bounds.bounds.width.sum())
    assert float(found.width.sum()) <= 1.001 * float(alpha.width.sum())
    assert not shared.is_hurried


def test_a_rigorous_search_begins_with_optimised_bounds() -> None:
    model, goal = subject(NET, 3, torch.float64, rigorous=True), specification_of(LOWER, UPPER, ROWS, [0.0], [0])
    root = bound_root(model, goal, BETA_CROWN, time.monotonic() + 1000)
    box, rows = goal.box(torch.float64), goal.rows
    margins = [
        model.engine.lower_bounds(model.engine.analyse(each, box, model.options), rows) for each in (CROWN, ALPHA_CROWN)
    ]
    assert float(margins[0]) < float(margins[1]) - 1e-3
    assert float(root.margins) == pytest.approx(float(margins[1]), abs=1e-6)
    assert not root.is_hurried


def test_a_timeout_says_that_there_was_no_time_to_optimise(
    trained: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimePlan, "optimising_deadline", lambda *_: -1.0)
    ranked, report = context(trained)
    hard = robustness(count=1, eps=0.2)
    job.run(specification(property=hard, method="beta-crown", budget={"seconds": 0.5, "restarts": 0}), ranked)
    (row,) = report.bounds
    assert row["reason"] == (
        "its 0.5 seconds were spent before the bounds of hidden values were optimised to the end, as alpha-crown does"
    )
