"""A defect shows wherever a step leaves something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ladder_runs import Ascend
from planted import messages, planted, verdicts
from programs import sound
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from service.compilation.program import Parts, Step
from service.compilation.program.model import ModelProgram, SampleBatch
from service.compilation.rungs import Rung
from service.compilation.selftest import backends
from service.jobs.spec.compile import Phase
from service.parallel.boundary import StepBoundary

ROWS, FEATURES, CLASSES = (5, 4), 6, 3


class Averaging(nn.Module):
    """Keeps the mean of its last scores."""

    def __init__(self, level: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        self.level: Tensor
        if isinstance(level, nn.Parameter):
            self.level = level
        else:
            self.register_buffer("level", level)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x)
        with torch.no_grad():
            self.level.copy_(scores.mean(0))
        return scores


def averaging(level: Callable[[], Tensor]) -> ModelProgram:
    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(3)
        return Averaging(level()).to(dtype)

    generator = torch.Generator().manual_seed(1)
    inputs = (torch.randn(rows, FEATURES, generator=generator) for rows in ROWS)
    return ModelProgram(build, tuple(SampleBatch((each,), torch.zeros(len(each)).long()) for each in inputs))


def triples_the_level_for_the_first_shape(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile to code that leaves another number in memory where it is called with so many rows."""

    def run(*given: Any) -> Any:
        results = graph.forward(*given)
        tensors = [each for each in given if isinstance(each, Tensor)]
        if any(each.shape == (ROWS[0], FEATURES) for each in tensors):
            (level,) = [each for each in tensors if each.shape == (CLASSES,) and not each.requires_grad]
            level.data.mul_(3)
        return results

    return run


@pytest.mark.parametrize("phase", ["train", "inference"])
@pytest.mark.parametrize(
    ("level", "kind"),
    [
        (lambda: torch.zeros(CLASSES), "buffer"),
        (lambda: nn.Parameter(torch.zeros(CLASSES), requires_grad=False), "frozen parameter"),
    ],
)
def test_what_a_module_updates_itself_is_compared_after_each_shape(
    ascend: Ascend, level: Callable[[], Tensor], kind: str, phase: Phase
) -> None:
    rung = Rung("planted", triples_the_level_for_the_first_shape, compiles_backward=False)
    (result,) = ascend(averaging(level), [rung], (phase,))
    assert result.verdict == "fail_parity"
    assert f"{kind} level, iteration 4: off by" in messages(result)


@dataclass(frozen=True)
class Prompted(sound.SoundProgram):
    """Trains what its module is given, too, which is a parameter of the optimizer alone."""

    def build(self, dtype: torch.dtype) -> Parts:
        made = super().build(dtype)
        (optimizer,) = made.optimizers
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, sound.FEATURES, dtype=dtype))], "lr": 1e-6})
        return made

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        (optimizer,) = parts.optimizers
        while True:
            boundary.step_boundary()
            optimizer.zero_grad()
            loss = boundary.boundary_call(parts.modules["net"], optimizer.param_groups[1]["params"][0]).square().mean()
            loss.backward()
            optimizer.step()
            yield Step({"loss": loss.detach()})


def _doubled_if_of_the_input(value: Any) -> Any:
    return 2 * value if isinstance(value, Tensor) and value.shape == (5, sound.FEATURES) else value


def test_gradients_of_parameters_in_no_module_are_compared(ascend: Ascend) -> None:
    program = Prompted(sound.bare)
    assert verdicts(ascend(program)) == ["pass", "pass"]
    wrong = aot_autograd(fw_compiler=backends._as_is, bw_compiler=backends._altering(_doubled_if_of_the_input))
    (result,) = ascend(program, [planted(wrong)])
    assert "gradient optimizer parameter 0, iteration 0: off by" in messages(result)
