"""Linear operators: bounds of a whole linear network are exact, whatever operators it is written with."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lanes import examples
from nets import box_around, output_bounds, prepared, redraw, samples
from operator_groups import blame
from torch import Tensor, nn

from service.bounds.graph import Node, Ref
from service.bounds.linear.plain import Pass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.methods.passes import propagate
from service.bounds.network import Network
from service.bounds.operators import convolution, linear
from service.bounds.operators.convolution import Convolution
from service.bounds.rank_group import RankGroup

Build = Callable[["Linears", Tensor], Tensor]


class Linears(nn.Module):
    """Linear maps of ``(batch, 6)`` side by side, each with operators of its own: tracing takes longer than bounds."""

    def __init__(self, builds: dict[str, Build]) -> None:
        super().__init__()
        self.builds = builds
        self.first, self.second = nn.Linear(6, 8), nn.Linear(6, 8)
        self.narrow, self.single = nn.Linear(4, 3), nn.Linear(6, 1)
        self.vector, self.matrix = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(6, 5))
        redraw(self, torch.Generator().manual_seed(7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([build(self, x).flatten(1) for build in self.builds.values()], dim=1)

    def names(self) -> list[str]:
        """Return for each output the map that it is of."""
        x = torch.zeros(1, 6, dtype=torch.float64)
        return [name for name, build in self.builds.items() for _ in range(build(self, x).numel())]


BUILDS: dict[str, Build] = {
    "linear": lambda m, x: m.first(x),
    "linear without bias": lambda m, x: nn.functional.linear(x, m.first.weight),
    "two linear layers": lambda m, x: m.narrow(m.first(x)[:, :4]),
    "addmm": lambda m, x: torch.addmm(m.vector[:5], x, m.matrix, beta=0.5, alpha=2.0),
    "addmm with a row": lambda m, x: torch.addmm(m.vector[None, :5], x, m.matrix),
    "mm": lambda m, x: torch.mm(x, m.matrix),
    "matmul of tokens": lambda m, x: torch.matmul(x.view(-1, 3, 2), m.matrix[:2]),
    "linear of tokens": lambda m, x: m.narrow(m.first(x).view(-1, 2, 4)),
    "sum of two": lambda m, x: m.first(x) + m.second(x),
    "weighted sum of two": lambda m, x: torch.add(m.first(x), m.second(x), alpha=-0.5),
    "difference of two": lambda m, x: m.first(x) - m.second(x),
    "a value minus itself": lambda m, x: m.first(x) - m.first(x),
    "plus a constant": lambda m, x: m.first(x) + m.vector,
    "constant minus": lambda m, x: m.vector - m.first(x),
    "one minus": lambda m, x: 1 - m.first(x),
    "plus a number": lambda m, x: m.first(x) + 2.5,
    "minus a number, weighted": lambda m, x: torch.sub(m.first(x), 2.5, alpha=3),
    "times a vector": lambda m, x: m.first(x) * m.vector,
    "vector times": lambda m, x: m.vector * m.first(x),
    "times a negative number": lambda m, x: m.first(x) * -3.0,
    "divided by a vector": lambda m, x: m.first(x) / m.vector,
    "divided by a number": lambda m, x: m.first(x) / -4,
    "negated": lambda m, x: -m.first(x),
    "broadcast sum": lambda m, x: m.first(x) + m.single(x),
    "broadcast product": lambda m, x: m.single(x) * m.vector,
    "broadcast constant": lambda m, x: m.first(x).view(-1, 2, 4) + m.vector[:2, None],
    "broadcast with a batch of one": lambda m, x: m.first(x) + m.vector[None],
    "view": lambda m, x: m.narrow(m.first(x).view(x.shape[0], 2, 4)),
    "flatten": lambda m, x: m.first(x).reshape(-1, 2, 4).flatten(1) + m.second(x),
    "transpose": lambda m, x: m.first(x).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8) + m.second(x),
    "permute": lambda m, x: m.first(x).view(-1, 2, 2, 2).permute(0, 3, 1, 2).reshape(-1, 8) + m.second(x),
    "unsqueeze and squeeze": lambda m, x: m.first(x).unsqueeze(1).squeeze(1),
    "expand": lambda m, x: m.single(x).expand(-1, 8) + m.first(x),
    "slice": lambda m, x: m.first(x)[:, 1:7:2] - m.second(x)[:, -3:],
    "slice of the last dimension": lambda m, x: m.first(x).view(-1, 2, 4)[..., 1:3],
    "concatenation": lambda m, x: torch.cat([m.first(x), m.second(x)], dim=-1),
    "clone": lambda m, x: m.first(x).clone().contiguous(),
    "the input itself": lambda m, x: x * 1.0,
}


def exact_bounds(network: nn.Module, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """``J c + b ± |J| r`` of a linear function."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: network(x[None])[0].flatten()))(centre)
    reach = torch.einsum("boi,bi->bo", jacobian.abs(), radius)
    value = network(centre).flatten(1)
    return value - reach, value + reach


@pytest.fixture(scope="module")
def linear_network() -> tuple[Linears, Network]:
    module = Linears(BUILDS).double()
    return module, prepared(module, 6)


@settings(max_examples=examples(3, 10), deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([0.0, 1e-6, 0.3, 1e3]))
def test_backward_bounds_are_exact(linear_network: tuple[Linears, Network], seed: int, radius: float) -> None:
    module, network = linear_network
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    radii = radius * torch.rand(3, 6, generator=generator, dtype=torch.float64)
    lower, upper = exact_bounds(module, centre, radii)
    found = output_bounds(network, box_around(centre, radii), "crown")
    for ours, exact in ((found.lower, lower), (found.upper, upper)):
        assert not blame(module, (ours - exact).abs() > 1e-12 * (1 + radius + exact.abs()))


def test_intervals_hold_every_intermediate_value(linear_network: tuple[Linears, Network]) -> None:
    module, network = linear_network
    generator = torch.Generator().manual_seed(3)
    box = box_around(torch.randn(2, 6, generator=generator, dtype=torch.float64), 0.2)
    output = propagate(network, box)[network.graph.output.name]
    for x in samples(box, 50, generator):
        y = module(x)
        assert output.lower.shape == y.shape
        assert not blame(module, output.lower > y + 1e-12)
        assert not blame(module, output.upper < y - 1e-12)


def test_rows_of_the_identity_need_not_be_materialised(linear_network: tuple[Linears, Network]) -> None:
    _, network = linear_network
    box = box_around(torch.randn(2, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64), 0.2)
    backward = Pass(network, {network.graph.input.name: box}, {})
    for node in network.graph.nodes[1:]:
        index = torch.arange(node.size).flip(0)
        for mirrored in (False, True):
            units = IdentityRows(index[None], mirrored)
            dense = units.dense(node.shape, box.lower)
            assert dense.shape[1] == units.count
            torch.testing.assert_close(backward.lower_bounds(node.name, units), backward.lower_bounds(node.name, dense))


def test_the_identity_never_exists_where_the_first_operator_backward_is_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = prepared(Linears({"linear": BUILDS["linear"]}).double().first, 6)
    monkeypatch.setattr(IdentityRows, "dense", lambda *_: pytest.fail("the identity was materialised"))
    box = box_around(torch.zeros(1, 6, dtype=torch.float64), 0.1)
    found = Pass(network, {network.graph.input.name: box}, {}).lower_bounds(
        network.graph.output.name, IdentityRows(torch.arange(8)[None])
    )
    assert found.shape == (1, 16)


def test_a_convolution_of_a_small_image_is_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = prepared(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten()).double(), 2, 2, 2)
    box = box_around(torch.randn(2, 2, 2, 2, dtype=torch.float64), 0.2)
    backward, made = Pass(network, {network.graph.input.name: box}, {}), list[int]()
    node = network.graph.nodes[1]
    units = IdentityRows(torch.arange(node.size)[None])
    dense = units.dense(node.shape, box.lower)
    adjoint = convolution._adjoint

    def counted(flat: Tensor, *arguments: object) -> Tensor:
        made.append(len(flat))
        return adjoint(flat, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(convolution, "_adjoint", counted)
    found = [backward.lower_bounds(node.name, rows) for rows in (units, dense, dense)]
    assert made == [node.size]
    monkeypatch.setattr(convolution, "MATRIX", 0)
    for each in found:
        torch.testing.assert_close(each, backward.lower_bounds(node.name, dense))
    assert made == [node.size, 2 * node.size, 2 * node.size, 2 * node.size]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_grouped_convolution_of_a_small_image_is_a_matrix_for_each_group(
    groups: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 5, padding=2, groups=groups)
    network = prepared(nn.Sequential(layer, nn.Flatten()).double(), 4, size, size)
    box = box_around(torch.randn(2, 4, size, size, dtype=torch.float64), 0.2)
    backward, node = Pass(network, {network.graph.input.name: box}, {}), network.graph.nodes[1]
    rows = torch.randn(2, 3, *node.shape, dtype=torch.float64)
    monkeypatch.setattr(convolution, "MATRIX", 0)
    expected = backward.lower_bounds(node.name, rows)
    monkeypatch.undo()
    backward.lower_bounds(node.name, rows)
    monkeypatch.setattr(convolution, "_adjoint", None)
    torch.testing.assert_close(backward.lower_bounds(node.name, rows), expected)


@pytest.mark.parametrize(("size", "kernel", "padding"), [(1, 1, 0), (2, 3, 1), (3, 5, 2), (8, 5, 2)])
def test_a_kernel_is_cropped_to_what_an_image_meets(size: int, kernel: int, padding: int) -> None:
    weight = torch.arange(25.0).reshape(1, 1, 5, 5)
    found, left = convolution._cropped(
        weight, (1, size, size), (1, size, size), [[1, 1], [2, 2], [1, 1], False, [0, 0], 1]
    )
    around = (5 - kernel) // 2
    assert torch.equal(found, weight[:, :, around : 5 - around, around : 5 - around])
    assert left == [padding, padding]


@given(
    by_matrix=st.booleans(),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
def test_a_convolution_and_its_adjoint_give_the_same_products(  # noqa: PLR0917 - one for each property
    by_matrix: bool,
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    channels: tuple[int, int, int],
) -> None:
    """Also of strides that leave inputs out, of padding beyond the kernel, of windows that end early, of groups."""
    assume(all(size + 2 * pad >= width for size, pad, width in zip(sizes, padding, kernel, strict=True)))
    generator = torch.Generator().manual_seed(sum(sizes) + 10 * sum(kernel) + 100 * sum(stride))
    outputs, inputs, groups = channels
    weight = torch.randn(groups * outputs, inputs, *kernel, generator=generator, dtype=torch.float64)
    x = torch.randn(1, groups * inputs, *sizes, generator=generator, dtype=torch.float64)
    values = nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
    y = torch.randn(1, 4, *values.shape[1:], generator=generator, dtype=torch.float64)
    fixed = {"dilation": (1, 1), "transposed": False, "output_padding": (0, 0), "groups": groups}
    arguments = {"input": Ref("x"), "weight": weight, "bias": None, "stride": stride, "padding": padding, **fixed}
    node = Node("c", "aten.convolution.default", arguments, tuple(values.shape[1:]), (tuple(x.shape[1:]),))
    with patch.object(convolution, "MATRIX", convolution.MATRIX if by_matrix else 0):
        (through,) = Convolution().backward(node, y, RankGroup()).coefficients
    assert isinstance(through, Tensor)
    torch.testing.assert_close((through * x[:, None]).sum(dim=(2, 3, 4)), (values[:, None] * y).sum(dim=(2, 3, 4)))


@pytest.mark.parametrize("at_once", [1, 7, 9, 100])
def test_a_weight_that_is_taken_in_parts_is_taken_whole(at_once: int) -> None:
    """One row at least, an uneven last part, and all rows at once."""
    generator = torch.Generator().manual_seed(2)
    weight, spread = torch.randn(7, 3, generator=generator), torch.rand(2, 5, 3, generator=generator)
    with patch.object(linear, "AT_ONCE", at_once):
        found = linear._through_magnitudes(spread, weight)
    torch.testing.assert_close(found, spread @ weight.abs().mT)
