"""Rigorous bounds of convolutions, whose rows are whole where other methods keep them in windows."""

import torch
from torch import nn

from service.bounds.interval import Interval
from service.bounds.methods import BoundOptions
from service.bounds.network import prepare
from service.bounds.optimise import Ascent
from service.bounds.rigorous import rigorous_alpha_crown, rigorous_crown


def test_lines_of_images_are_optimised_rigorously() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(98, 2)).double().requires_grad_(False)
    centre = torch.rand(1, 1, 7, 7, dtype=torch.float64)
    box, network = Interval.around(centre, torch.full_like(centre, 0.5)), prepare(module, (1, 7, 7))
    rows = torch.tensor([[[1.0, -1.0], [-1.0, 0.0]]], dtype=torch.float64)
    options = BoundOptions(ascent=Ascent(iterations=3))
    optimised = rigorous_alpha_crown(network, box, options).lower_bounds(rows)[0]
    plain = rigorous_crown(network, box, options).lower_bounds(rows)[0]
    points = box.lower + box.width * torch.rand(500, 1, 7, 7, dtype=torch.float64)
    assert (optimised > plain + 1e-6).all()
    assert (optimised <= (module(points) @ rows[0].T).amin(dim=0)).all()
