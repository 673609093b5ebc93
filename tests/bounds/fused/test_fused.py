"""Steps of a pass that have kernels: what torch's operators make of them, and that kernels make the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import mlp, prepared
from torch import Tensor

from service.bounds import fused, planes
from service.bounds import relaxation as relaxation_module
from service.bounds.capture import local_state
from service.bounds.fused import adam, boxes, building, lines, products, tables
from service.bounds.interval import Interval
from service.bounds.linear.rows.patches import Patches
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare_stage
from service.bounds.optimise import Ascent
from service.bounds.relaxation import Relaxation

SEEDS = st.integers(0, 2**20)
USERS = (adam, boxes, lines, products, tables)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def randoms(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype).to(device)


def free_slopes(number: Callable[..., Tensor], shape: tuple[int, ...]) -> fused.FreeSlopes:
    """Of ReLUs on random intervals, about half of which contain 0; instances differ in how many."""
    low = number(*shape) - torch.arange(shape[0], device=number(1).device).reshape(-1, *[1] * (len(shape) - 1))
    high = low + number(*shape).abs() + 1
    open_ = (low < 0) & (high > 0)
    fixed = (low >= 0).to(low.dtype)
    chord = torch.where(open_, high / (high - low), fixed)
    return fused.FreeSlopes.at(open_, 0.0, fixed, chord, torch.where(open_, -low * chord, torch.zeros_like(low)))


@given(SEEDS, st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_free_slopes_are_those_of_each_instance(seed: int, batch: int) -> None:
    """Entry by entry: an open one has its own parameter's slope, another the fixed one."""
    number = randoms(seed)
    free = free_slopes(number, (batch, 2, 3))
    rows, places = 4, free.index.shape[1]
    coefficients, parameters = number(batch, rows, 2, 3), number(batch, rows, places).sigmoid()
    through, bias = fused.propagate_free_slopes(coefficients, free, parameters)
    codes, flat = free.codes, coefficients.flatten(2)
    for instance in range(batch):
        for entry in range(6):
            code = int(codes[instance, entry])
            slope = parameters[instance, :, code] if code >= 0 else free.lower[instance, entry].expand(rows)
            x = flat[instance, :, entry]
            expected = torch.where(x > 0, x * slope, x * free.upper[instance, entry])
            torch.testing.assert_close(through.flatten(2)[instance, :, entry], expected)
    torch.testing.assert_close(bias, (flat.clamp(max=0) * free.above.unsqueeze(1)).sum(dim=2))


@given(SEEDS, st.booleans())
@settings(max_examples=30, deadline=None)
def test_places_between_planes_are_sound(seed: int, of_matrices: bool) -> None:
    number = randoms(seed)
    shapes = ((2, 2, 3), (2, 3, 2)) if of_matrices else ((2, 5), (2, 5))
    ends = [(low := number(*shape), low + number(*shape).abs()) for shape in shapes]
    points = [low + (high - low) * number(*low.shape).sigmoid() for low, high in ends]
    value = points[0] @ points[1] if of_matrices else points[0] * points[1]
    coefficients = number(2, 3, *value.shape[1:])
    terms = (2, 3, 2) if of_matrices else (5,)
    propagate = fused.propagate_matrices if of_matrices else fused.propagate_products
    onto_x, onto_y, bias = propagate(coefficients, number(2, 3, *terms).sigmoid(), *ends)
    exact = (coefficients * value.unsqueeze(1)).flatten(2).sum(dim=2)
    bound = (
        sum((a * p.unsqueeze(1)).flatten(2).sum(dim=2) for a, p in zip((onto_x, onto_y), points, strict=True)) + bias
    )
    assert bool((bound <= exact + 1e-9).all())


def test_steps_are_those_of_torchs_adam_within_the_box() -> None:
    number = randoms(3)
    ours = number(7, 5).sigmoid().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    own = fused.Adam([ours], 0.5, 0.9)
    other = torch.optim.Adam([theirs], lr=0.5)
    for _ in range(2):
        own.restart()
        with torch.no_grad():
            ours.copy_(theirs)
        other = torch.optim.Adam([theirs], lr=0.5)
        for _ in range(4):
            gradient = number(7, 5)
            theirs.grad = gradient.clone()
            ours.grad = gradient
            gradient[0, 0], theirs.grad[0, 0] = torch.nan, 0
            own.step()
            other.step()
            with torch.no_grad():
                theirs.clamp_(0, 1)
            other.param_groups[0]["lr"] *= 0.9
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_without_a_compiler_there_is_a_word_and_no_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "service.bounds.fused.kernels", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert building._built.__wrapped__(torch.device("cuda:0")) is None
    assert "without fused kernels" in caplog.text


def test_a_few_entries_are_no_reason_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(building, "_built", asked.append)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    small, large = torch.ones(building.FEWEST - 1), torch.ones(building.FEWEST)
    building.kernels_for(small)
    building.kernels_for(large, entries=1)
    assert not asked
    building.kernels_for(large)
    building.kernels_for(small, entries=building.FEWEST)
    assert len(asked) == 2


@pytest.mark.parametrize("backward", [Relaxation.backward, planes.backward_in_few_steps])
def test_a_steep_line_takes_no_digits_from_a_flat_one(backward: Callable[..., tuple[Any, Tensor | None]]) -> None:
    steep, flat = torch.tensor([[-2e9]], dtype=torch.float64), torch.tensor([[0.1]], dtype=torch.float64)
    for lower, upper in ((steep, flat), (flat, steep)):
        found, _ = backward(Relaxation(lower, upper), torch.tensor([[[-1.0], [1.0]]], dtype=torch.float64))
        through = found[0] if isinstance(found, tuple) else found
        assert through.flatten().tolist() == [-upper.item(), lower.item()]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_a_product_is_one_of_two_matrices_whatever_the_order_in_memory(order: tuple[int, ...]) -> None:
    number = randoms(11)
    coefficients, weight = number(2, 3, 4).permute(order), number(4 if order[-1] == 2 else 3, 5)
    found = fused.product(coefficients, weight)
    torch.testing.assert_close(found, torch.einsum("brk,kn->brn", coefficients, weight))
    with torch.profiler.profile() as profile:
        fused.product(coefficients, weight)
    names = [event.key for event in profile.key_averages()]
    assert "aten::mm" in names
    assert "aten::bmm" not in names


class Rough:
    """Stands for the kernel, and counts."""

    def __init__(self) -> None:
        self.rough_product, self.count = self, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run

    def _run(self, onto: Tensor, weight: Tensor, out: Tensor, *sizes: int, **tile: int) -> None:
        self.count += 1
        out.copy_(onto @ weight.mT)


def test_gradients_are_rough_where_they_choose_relaxations_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp([5, 8, 8, 3], torch.nn.ReLU(), seed=3)
    x, rows = randoms(2, dtype=torch.float32)(4, 5), torch.eye(3).unsqueeze(0)
    box = Interval(x - 0.2, x + 0.2)
    kernels = Rough()
    monkeypatch.setattr(tables, "kernels_for", lambda *tensors, entries=None: kernels)
    frozen = [each for each in module if isinstance(each, torch.nn.Linear)][1].requires_grad_(False)
    network = prepare_stage(module, (5,)).network(local_state(module))
    METHODS["crown-ibp"](network, box, BoundOptions()).lower_bounds(rows).sum().backward()
    trained = [each.grad for each in module.parameters() if each.requires_grad]
    assert all(each is not None and bool(each.any()) for each in trained)
    assert frozen.weight.grad is None
    assert kernels.count == 0
    METHODS["alpha-crown"](prepared(module.requires_grad_(False), 5), box, BoundOptions(ascent=Ascent(2))).lower_bounds(
        rows
    )
    assert kernels.count > 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_between_a_line_and_none_there_is_only_the_line(sign: float) -> None:
    """A slope between both with the intercept of one bounds nothing; such tables come from values near overflow."""
    slopes = torch.tensor([1.0, 3.0, 1.0, 3.0]).reshape(1, 4, 1)
    intercepts = torch.tensor([-2.0, -torch.inf, 2.0, torch.inf]).reshape(1, 4, 1)
    coefficients, places = torch.full((1, 5, 1), sign), torch.linspace(0, 1, 5).reshape(1, 5, 1)
    through, bias = fused.propagate_table(coefficients, places, slopes, intercepts)
    assert (through == sign).all()
    assert (bias == -2.0).all()
    steep = torch.tensor([1.0, torch.inf, 1.0, torch.inf]).reshape(1, 4, 1)
    through, bias = fused.propagate_table(
        coefficients, places, steep, torch.tensor([-2.0, 5.0, 2.0, -5.0]).reshape(1, 4, 1)
    )
    assert (through == sign).all()
    assert (bias == -2.0).all()


def cases(device: str, dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Functions of what may take a gradient."""
    number = randoms(5, device, dtype)
    batch, rows, shape = 3, 6, (7, 10)
    whole, same = (batch, rows, *shape), (batch, 1, *shape)
    free = free_slopes(number, (batch, *shape))
    place = number(*whole).sigmoid()
    matrix, index = number(20, 70), torch.arange(9, device=device).reshape(batch, 3)
    table = number(batch, 18, 70), number(batch, 18, 70)
    x = (low := number(batch, 2, 5, 8), low + number(batch, 2, 5, 8).abs())
    y = (low := number(batch, 2, 8, 6), low + number(batch, 2, 8, 6).abs())
    ends = [(low := number(batch, *shape), low + number(batch, *shape).abs()) for _ in range(2)]
    fixed = [number(*same) for _ in range(3)]
    picked = GatheredRows(matrix, index, mirrored=True)
    places = number(batch, rows, free.index.shape[1]).sigmoid()
    flat = number(batch, rows, 70)
    return {
        "lines of rows": (fused.propagate_lines, tuple(number(*whole) for _ in range(5))),
        "common lines": (lambda a: fused.propagate_lines(a, fixed[0], fixed[1], None, fixed[2]), (number(*whole),)),
        "lines of a matrix": (lambda *_: fused.propagate_lines(picked, fixed[0], fixed[1], fixed[2], None), ()),
        "free slopes": (lambda a, p: fused.propagate_free_slopes(a, free, p), (number(*whole), places)),
        "free slopes of a matrix": (lambda p: fused.propagate_free_slopes(picked, free, p), (places,)),
        "boxes": (lambda a: (fused.least(a, table[0][:, 0], table[1][:, 0].abs()),), (flat,)),
        "tables": (lambda a, p: fused.propagate_table(a, p, *table), (flat, place.flatten(2))),
        "products": (lambda a, p: fused.propagate_products(a, p, *ends), (number(*whole), place)),
        "matrices": (
            lambda a, p: fused.propagate_matrices(a, p, x, y),
            (number(batch, rows, 2, 5, 6), number(batch, rows, 2, 5, 8, 6).sigmoid()),
        ),
    }


def results(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Values and gradients."""
    given = [each.clone().requires_grad_() for each in inputs]
    found = [each for each in function(*given) if each is not None]
    weights = [torch.linspace(-1, 1, each.numel(), device=each.device).reshape(each.shape) for each in found]
    if given:
        sum((each * weight).sum() for each, weight in zip(found, weights, strict=True)).backward()
    return [*(each.detach() for each in found), *(each.grad for each in given if each.grad is not None)]


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in USERS:
        monkeypatch.setattr(user, "kernels_for", lambda *tensors, entries=None: None)


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(cases("cpu", torch.float64)))
def test_kernels_make_the_same(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(building, "FEWEST", 0)
    function, inputs = cases("cuda", dtype)[name]
    assert building.kernels_for(torch.ones(1, device="cuda")) is not None
    ours = results(function, inputs)
    without_kernels(monkeypatch)
    for one, other in zip(ours, results(function, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_permuted", [False, True])
def test_lines_that_are_one_multiplication_at_most_entries(is_permuted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of one instance that differ count in all; an infinite slope is no multiplication."""
    number = randoms(8)
    slope, coefficients = number(2, 3, 20), number(2, 5, 3, 20)
    if is_permuted:  # as a transpose behind the operator leaves them
        coefficients = number(2, 5, 20, 3).transpose(2, 3)
    upper, above = slope.clone(), torch.zeros_like(slope)
    upper[0, 1, 4], above[1, 2, 7], slope[1, 0, 0], upper[1, 0, 0] = 2.0, 0.5, torch.inf, torch.inf
    relaxation = Relaxation(slope, upper, None, above)
    expected, bias = relaxation.backward(coefficients)
    monkeypatch.setattr(relaxation_module, "LONG", 0)
    monkeypatch.setattr(fused, "propagate_lines", None)
    with torch.no_grad():
        found, its_bias = relaxation.backward(coefficients)
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    torch.testing.assert_close(its_bias, bias)


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("own_places", [True, False])
def test_windows_go_through_kernels_as_they_do_without(monkeypatch: pytest.MonkeyPatch, own_places: bool) -> None:
    monkeypatch.setattr(building, "FEWEST", 0)
    number = randoms(7, "cuda", torch.float32)
    below, above, low = number(3, 2, 8, 10), number(3, 2, 8, 10), number(3, 2, 8, 10)
    place = torch.randint(0, 4, (3 if own_places else 1, 5, 2), device="cuda")
    patches = Patches(number(len(place), 5, 2, 4, 3), place, (4, 5), (2, 2), (-2, -1))
    relaxation = Relaxation(number(3, 2, 8, 10), number(3, 2, 8, 10), below, above)
    ours, least = relaxation.backward_patches(patches), patches.least(low, low + above.abs())
    without_kernels(monkeypatch)
    others, also_least = relaxation.backward_patches(patches), patches.least(low, low + above.abs())
    assert ours.bias is not None
    (ours_patches,), (others_patches,) = ours.coefficients, others.coefficients
    torch.testing.assert_close(ours_patches.values, others_patches.values)
    torch.testing.assert_close(ours.bias, others.bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(least, also_least, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(cases("cpu", torch.float64)))
def test_gradients_without_kernels_are_those_of_differences(name: str) -> None:
    function, inputs = cases("cpu", torch.float64)[name]
    given = tuple(each[:2, :2].clone().requires_grad_() for each in inputs) if name == "lines of rows" else ()
    if given:
        assert torch.autograd.gradcheck(function, given)
    assert all(each.isfinite().all() for each in results(function, inputs))


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_a_kernel_are_torchs(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(building, "FEWEST", 0)
    number = randoms(5, "cuda", dtype)
    places = [number(70, 30).sigmoid()] * 2
    ours, theirs = (each.clone().requires_grad_() for each in places)
    own, other = fused.Adam([ours], 0.3, 0.98), fused.Adam([theirs], 0.3, 0.98)
    for _ in range(5):
        ours.grad = theirs.grad = number(70, 30)
        own.step()
        with torch.no_grad():
            other._move_in_steps(theirs, theirs.grad, other.means[0], other.squares[0])
            other.steps += 1
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
