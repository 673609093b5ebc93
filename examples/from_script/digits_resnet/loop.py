"""The loop of the script: one step at a time, its network called across the boundary that Trivet watches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn

from digits_resnet.declared import DigitsLoop
from digits_resnet.network import small_resnet
from service.models.program import Parts, Site, Step
from service.parallel.boundary import StepBoundary


class DigitsProgram:
    """Trains on batches that follow from the number of the step, so that a later attempt goes on with the same ones."""

    period = 1

    def __init__(self, config: DigitsLoop, site: Site) -> None:
        self.config, self.device = config, site.device
        pictures, labels = load_digits(return_X_y=True)
        self.inputs = torch.tensor(pictures / 16).view(-1, 1, 8, 8).to(site.device)
        self.targets = torch.tensor(labels).to(site.device)

    def build(self, dtype: torch.dtype) -> Parts:
        network = small_resnet(self.config.width).to(self.device, dtype)
        optimizer = torch.optim.SGD(network.parameters(), self.config.lr, momentum=0.9, weight_decay=1e-4)
        return Parts({"network": network}, ("network",), (optimizer,), dtype)

    def train(self, parts: Parts, boundary: StepBoundary, first: int = 0) -> Iterator[Step]:
        (optimizer,) = parts.optimizers
        network = parts.modules["network"].train()
        while True:
            boundary.step_boundary()
            rows = 300 + torch.randint(len(self.inputs) - 300, (self.config.batch,), device=self.device)
            scores = boundary.boundary_call(network, self.inputs[rows].to(parts.dtype))
            loss = nn.functional.cross_entropy(scores, self.targets[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            yield Step({"loss": loss.detach()})

    def evaluate(self, parts: Parts, boundary: StepBoundary) -> dict[str, float]:
        network = parts.modules["network"].eval()
        boundary.step_boundary()
        with torch.no_grad():
            scores = boundary.boundary_call(network, self.inputs[:300].to(parts.dtype))
        return {"accuracy": (scores.argmax(1) == self.targets[:300]).float().mean().item()}
