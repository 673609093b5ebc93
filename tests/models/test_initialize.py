"""Weights drawn from counters: any part of any layout is a part of the same whole, of the right distribution."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from service.models import initialize
from service.models.initialize import Constant, Normal, Uniform, draw, key_of, materialize, random_bits, unit
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from service.parallel.tensor.placement import places_of

MASK = 2**64 - 1
SAMPLES = 400_000
NORMAL = Normal(0.02)


def splitmix64(key: int, index: int) -> int:
    """The reference, on numbers of any size (Steele, Lea & Flood, 2014)."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def drawn(shape: tuple[int, ...], dimension: int | None = None, axis: Axis = SINGLE, **changes: Any) -> Tensor:
    given: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "key": key_of(0, "w"), **changes}
    return draw(given.pop("distribution", NORMAL), given.pop("key"), shape, dimension, axis, **given)


def values(distribution: initialize.Distribution = NORMAL, name: str = "w", seed: int = 0) -> Tensor:
    return drawn((SAMPLES,), distribution=distribution, key=key_of(seed, name)).double()


@settings(deadline=None)
@given(key=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 2**62))
def test_bits_are_those_of_the_reference(key: int, index: int) -> None:
    assert int(random_bits(key, torch.tensor(index))) & MASK == splitmix64(key, index)


def test_the_reference_is_the_published_generator() -> None:
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF
    assert [splitmix64(1234567, index) for index in range(2)] == [6457827717110365317, 3203168211198807973]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 40),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_parts_are_parts_of_one_whole(
    sizes: list[int], data: st.DataObject, tp: int, at_once: int, dtype: torch.dtype
) -> None:
    """Whatever is divided, however many elements are drawn together, and the type only rounds."""
    dimension = data.draw(st.none() | st.integers(0, len(sizes) - 1))
    shape = tuple(size * tp if index == dimension else size for index, size in enumerate(sizes))
    whole = drawn(shape)
    with patch.object(initialize, "AT_ONCE", at_once):
        parts = [drawn(shape, dimension, Axis(tp, rank, "group"), dtype=dtype) for rank in range(tp)]
    joined = parts[0] if dimension is None else torch.cat(parts, dimension)
    assert torch.equal(joined, whole.to(dtype))
    assert dimension is not None or all(torch.equal(part, joined) for part in parts)


def test_an_element_depends_on_its_place_in_the_whole_alone() -> None:
    """The i-th of row-major order, whatever shape gives the order."""
    flat = drawn((24,))
    assert torch.equal(drawn((2, 3, 4)).flatten(), flat)
    assert torch.equal(drawn((4, 6)).flatten(), flat)
    assert torch.equal(drawn(()), flat[0])
    assert torch.equal(drawn((1000,))[:24], flat)


def test_drawing_neither_reads_nor_moves_the_stream_of_the_process() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn((64,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(drawn((64,)), first)


def test_a_model_gets_its_parameters_by_name() -> None:
    """A part of a model, such as a pipeline stage, draws what the whole model draws under the same names."""

    def planned(axis: Axis, *names: str) -> nn.ModuleDict:
        kinds = {"first": ColumnParallelLinear(6, 8, axis), "second": RowParallelLinear(8, 4, axis)}
        model = nn.ModuleDict({name: kinds[name] for name in names}).to("meta")
        device, places = torch.device("cpu"), places_of(model)
        materialize(model, places, lambda _: NORMAL, axis=axis, dtype=torch.float32, device=device, seed=5)
        return model

    whole = planned(SINGLE, "first", "second").state_dict()
    for rank in range(2):
        axis = Axis(2, rank, "group")
        first, second = planned(axis, "first"), planned(axis, "second")
        own = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(first["first"].weight, whole["first.weight"][own])
        assert torch.equal(first["first"].bias, whole["first.bias"][own])
        assert torch.equal(second["second"].weight, whole["second.weight"][:, own])
        assert torch.equal(second["second"].bias, whole["second.bias"])


@pytest.mark.parametrize(
    ("name", "seed"), [("w", 1), ("v", 0), ("w.weight", 0), ("blocks.0.w", 0), ("blocks.1.w", 0), ("1:w", 0)]
)
def test_other_names_and_seeds_are_independent(name: str, seed: int) -> None:
    first, second = values(), values(name=name, seed=seed)
    assert not bool((first == second).all())
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(SAMPLES)


def test_a_seed_and_a_name_do_not_run_together() -> None:
    keys = {key_of(seed, name) for seed in range(30) for name in ("w", "0w", "0:w", "blocks.0.w", "blocks.1.w")}
    assert len(keys) == 150


def test_neighbours_are_independent() -> None:
    own = values()
    for distance in (1, 2, 64, 4096):
        correlation = float(torch.corrcoef(torch.stack([own[distance:], own[:-distance]]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(SAMPLES), distance


def largest_deviation(sample: Tensor, distribution: torch.distributions.Distribution) -> float:
    """Between the sample's cumulative distribution and the wanted one (Kolmogorov and Smirnov)."""
    ordered = sample.sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    return float((distribution.cdf(ordered) - steps).abs().max())


def test_normal_weights_are_normal() -> None:
    sample = values(Normal(0.02))
    assert abs(sample.mean()) < 5 * 0.02 / math.sqrt(SAMPLES)
    assert sample.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * SAMPLES))
    # Exceeded by one sample in a thousand; the numbers are the same in every run.
    assert largest_deviation(sample, torch.distributions.Normal(0, 0.02)) < 1.95 / math.sqrt(SAMPLES)
    assert 0.02 * 4 < sample.abs().max() < 0.02 * 6.7


def test_uniform_weights_are_uniform() -> None:
    sample = values(Uniform(0.25))
    assert abs(sample.mean()) < 5 * 0.25 / math.sqrt(3 * SAMPLES)
    assert sample.std().item() == pytest.approx(0.25 / math.sqrt(3), rel=0.005)
    assert largest_deviation(sample, torch.distributions.Uniform(-0.2501, 0.2501)) < 3 / math.sqrt(SAMPLES)
    assert sample.abs().max() <= 0.25


def test_constants_are_constant() -> None:
    assert torch.equal(drawn((3, 2), distribution=Constant(1.5)), torch.full((3, 2), 1.5))


def test_the_ends_of_the_range_are_finite() -> None:
    """All bits zero and all bits one: neither the logarithm of zero nor a number beyond the bound."""
    ends = torch.tensor([0, -1, 0xFFFFFFFF, ~0xFFFFFFFF])
    assert bool(((unit(ends) > 0) & (unit(ends) <= 1)).all())
    assert bool(Normal(1.0)(ends).isfinite().all())
    assert bool((Uniform(1.0)(ends).abs() <= 1).all())


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="dimension=5 does not divide by tp=2"):
        drawn((5, 2), 0, Axis(2, 0, "group"))
