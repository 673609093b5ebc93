"""The program: a scorer that is trained, and a loop that asks it again and again where to go next."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from service.models.program import Parts, Site, Step
from service.parallel.boundary import StepBoundary
from trivet_example.declared import AllocatorProgram


class Scorer(nn.Module):
    """Scores of ``candidates``, given a summary of what was chosen before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * width, 2 * width)
        self.last = nn.Linear(2 * width, 1)

    def forward(self, candidates: Tensor, chosen: Tensor) -> Tensor:
        both = torch.cat((candidates, chosen.expand_as(candidates)), dim=-1)
        return self.last(torch.tanh(self.first(both))).squeeze(-1)


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Allocator:
    def __init__(self, config: AllocatorProgram, site: Site) -> None:
        self.config, self.device = config, site.device
        generator = torch.Generator().manual_seed(site.seed)
        self.items = torch.randn(config.items, config.width, generator=generator).to(site.device)

    period = 1

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(1)
        encoder, scorer = Encoder(self.config.width), Scorer(self.config.width)
        for module in (encoder, scorer):
            module.to(self.device, dtype)
        optimizer = torch.optim.SGD([*encoder.parameters(), *scorer.parameters()], lr=0.1)
        return Parts({"encoder": encoder, "scorer": scorer}, ("encoder", "scorer"), (optimizer,), dtype)

    def train(self, parts: Parts, boundary: StepBoundary, first: int = 0) -> Iterator[Step]:
        """Several forwards of the scorer, one backward; nothing in a step depends on how many were done before."""
        (optimizer,) = parts.optimizers
        while True:
            boundary.step_boundary()
            items = self.items.to(parts.dtype)
            encoded = boundary.boundary_call(parts.modules["encoder"], items)
            chosen, loss = encoded.mean(0), encoded.new_zeros(())
            for _ in range(self.config.rounds):
                scores = boundary.boundary_call(parts.modules["scorer"], encoded, chosen)
                loss = loss + (scores - items.sum(-1)).square().mean()
                chosen = chosen + torch.softmax(scores, 0) @ encoded
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield Step({"loss": loss.detach()}, {"chosen": chosen.detach()})

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        """The scorer decides which item it sees next."""
        while True:
            boundary.step_boundary()
            with torch.no_grad():
                encoded = boundary.boundary_call(parts.modules["encoder"], self.items.to(parts.dtype))
                chosen = encoded.mean(0)
                for _ in range(self.config.rounds):
                    scores = boundary.boundary_call(parts.modules["scorer"], encoded, chosen)
                    chosen = encoded[scores.argmax()]
            yield Step(outputs={"scores": scores, "chosen": chosen})

    def evaluate(self, parts: Parts, boundary: StepBoundary) -> dict[str, float]:
        """Return how far the scores are from what the items are worth."""
        scores = next(self.inference(parts, boundary)).outputs["scores"]
        return {"error": float((scores - self.items.sum(-1)).square().mean())}


def allocator(config: AllocatorProgram, site: Site) -> Allocator:
    return Allocator(config, site)
