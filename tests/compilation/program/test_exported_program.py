"""A module that a client exported computes on a rank what it computes there, in both modes and dtypes."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from service.compilation.program import Site
from service.compilation.program.exported import exported_program
from service.compilation.program.model import MODEL, ModelProgram
from service.jobs.files import DataLayout
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.program import ExportedProgram
from service.parallel import mesh
from trivet import ModuleRefused
from trivet.exporting import write_exported


class Net(nn.Module):
    """Buffers, dropout, a layer in two places, a frozen tensor, two inputs, two outputs, what is made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head, self.drop = nn.Linear(4 * 36, 3), nn.Dropout(0.1)
        self.mix = nn.Linear(3, 3)
        self.again = self.mix
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.drop(self.head(torch.relu(self.norm(self.conv(x))).flatten(1))) + torch.arange(3) * self.shift
        z = self.again(self.mix(z)).masked_fill(z > 100, -torch.inf).softmax(-1)
        first, second = z.split([1, 2], -1)
        return {"first": first * y, "second": second}


EXAMPLE = (torch.randn(2, 1, 8, 8), torch.randn(2, 1))


def program_of(path: Path, module: nn.Module, inputs: tuple[Tensor, ...], *phases: str) -> ModelProgram:
    write_exported(module, inputs, phases or ("train", "inference"), path / "exported")
    layout = DataLayout(path)
    file = f"file_{hashlib.sha256((path / 'exported').read_bytes()).hexdigest()}"
    layout.file(file).parent.mkdir(parents=True, exist_ok=True)
    (path / "exported").rename(layout.file(file))
    site = Site(torch.device("cpu"), mesh.build(ParallelSpec(), "cpu"), 0, layout)
    return exported_program(ExportedProgram(file=file), site)


def test_both_modes_compute_what_the_module_computes_and_leave_it_alone(tmp_path: Path) -> None:
    module = Net()
    module.norm.eval()
    before = copy.deepcopy(module.state_dict())
    program = program_of(tmp_path, module, EXAMPLE)
    assert (module.training, module.norm.training, module.drop.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    built = program.build(torch.float32).modules[MODEL]
    assert {name for name, each in built.named_parameters() if each.requires_grad} == {
        f"{layer}.{kind}" for layer in ("conv", "norm", "head", "mix") for kind in ("weight", "bias")
    }
    for training in (False, True):
        module.train(training)
        built.train(training)
        torch.manual_seed(0)
        expected = module(*EXAMPLE)
        torch.manual_seed(0)
        first, second = built(*EXAMPLE)
        assert torch.equal(first, expected["first"])
        assert torch.equal(second, expected["second"])
    assert torch.equal(built.get_buffer("norm.running_mean"), module.norm.running_mean)

    precise = program.build(torch.float64).modules[MODEL].eval()
    exact, _ = precise(*(value.double() for value in EXAMPLE))
    assert exact.dtype == torch.float64


class Jumping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)  # type: ignore[no-any-return]


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Unique(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.unique(x)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(4))
        self.part = nn.Parameter(self.whole.data[:2])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.whole + self.part.sum()


class Ungraded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Jumping(), r"Jumping cannot be exported in 'gate' at test_exported_program\.py:\d+: "),
        (
            Nonzero(),
            r"Nonzero cannot be exported at test_exported_program\.py:\d+: aten\.\S+ gives a number or a shape",
        ),
        (Unique(), r"Unique cannot be exported at test_exported_program\.py:\d+: aten\._unique2\.default gives a numb"),
        (Viewing(), r"part is a view of whole"),
        (Ungraded(), r"Ungraded at test_exported_program\.py:\d+ calls 'wrap_with_set_grad_enabled'"),
        (nn.Linear(4, 4).bfloat16(), r"weight is torch\.bfloat16; expected float32 in all of the module"),
        (nn.Linear(4, 4, device="meta"), r"weight has no values: it is on the meta device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_exported_is_refused_with_its_place(module: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModuleRefused, match=message):
        write_exported(module, (torch.ones(1, 4),), ("inference",), tmp_path / "file")


def test_a_rank_refuses_operators_that_do_not_compute_tensors(tmp_path: Path) -> None:
    from service.compilation.program.exported import _operator_of

    assert _operator_of("aten.relu.default") is torch.ops.aten.relu.default
    for name in ("aten.item.default", "aten.set.source_Storage", "aten.nothing.default", "aten.rename.default"):
        with pytest.raises(ValueError, match=f"calls {name}, which"):
            _operator_of(name)
