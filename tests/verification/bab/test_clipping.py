"""Domains of a search over activations have bounds of the first layer that hold where a counterexample may be."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nets import mlp
from scipy.optimize import linprog
from search_problems import exact_minimum, model_from, searched, specification_of
from torch import nn

from service.bounds.interval import Interval
from service.bounds.network import prepare
from service.verification.bab.activations import clipping
from service.verification.bab.activations.clipping import FirstLayer, Forms, least_within
from service.verification.bab.settings import ActivationSearchSettings, ClippingSettings, SearchSettings
from service.verification.verdict import Verdict


@pytest.mark.parametrize("count", [1, 3])
def test_ends_are_least_over_the_cube_and_halfspaces(count: int) -> None:
    """Exactly over one halfspace; over several never more than a linear program, and more than over the cube."""
    generator = torch.Generator().manual_seed(count)

    def forms(number: int) -> Forms:
        slopes = torch.randn(1, number, 7, generator=generator, dtype=torch.float64)
        constants = torch.rand(1, number, generator=generator, dtype=torch.float64)
        return Forms(slopes, constants, slopes.abs().sum(dim=2) + constants)

    rows, halfspaces = forms(40), forms(count)
    found = least_within(rows, halfspaces)[0].numpy()
    matrix, limits = halfspaces.slopes[0].numpy(), -halfspaces.constants[0].numpy()
    exact = np.array([linprog(row, matrix, limits, bounds=(-1, 1)).fun for row in rows.slopes[0].numpy()])
    exact += rows.constants[0].numpy()
    assert (found <= exact).all()
    on_cube = (rows.constants - rows.slopes.abs().sum(dim=2))[0].numpy()
    assert np.allclose(found, exact, atol=1e-6) if count == 1 else (found - on_cube).sum() > (exact - found).sum()


def test_no_counterexample_is_cut_off_where_large_terms_cancel() -> None:
    """A constant in float32 that is what is left of large terms: the exact least value is never below an end."""
    centre = torch.full((1, 6), 1000.0)
    net = mlp([6, 40, 1], nn.ReLU(), 3).requires_grad_(False)
    first = net[0]
    first.bias.copy_(-(first.weight @ centre[0]))
    box, bounds = Interval(centre - 0.25, centre + 0.25), Interval(-torch.ones(1, 40), torch.ones(1, 40))
    layer = FirstLayer.of(prepare(net, (6,)), box, bounds)
    cut_nothing = Forms(torch.zeros(1, 1, 6), -torch.ones(1, 1), torch.ones(1, 1))
    found = least_within(layer.forms.at(torch.arange(40)[None]), cut_nothing)[0].double()
    weight, bias = first.weight.double(), first.bias.double()
    exact = weight @ centre[0].double() + bias - 0.25 * weight.abs().sum(dim=1)
    assert (found <= exact).all()
    assert (exact - found).max() < 0.2


def test_a_wide_layer_takes_far_fewer_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same proof, with and without clipping; and with one whose time is over, which leaves all ends alone."""
    net = mlp([5, 14, 2], nn.ReLU(), 5).double().requires_grad_(False)
    lower, upper = -torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    row = torch.tensor([1.0, -1.0], dtype=torch.float64)
    least, domains = exact_minimum(net, lower, upper, row), dict[str, int]()
    for name, most in (("without", 0), ("clipped", 2**22), ("late", 2**22)):
        settings = ActivationSearchSettings(clipping=ClippingSettings(most_slopes={"cpu": most}))
        subject = replace(model_from(net, 5), settings=SearchSettings(activations=settings))
        if name == "late":
            monkeypatch.setattr(clipping, "time", SimpleNamespace(monotonic=lambda: inf))
        for offset, verdict in ((-0.01, Verdict.VERIFIED), (0.01, Verdict.FALSIFIED)):
            finding, _ = searched(subject, specification_of(lower, upper, row[None], [least + offset], [0]))
            assert finding.verdict is verdict
            if verdict is Verdict.VERIFIED:
                domains[name] = finding.domains
    assert domains["clipped"] * 2 < min(domains["without"], domains["late"]), domains
