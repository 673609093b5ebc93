"""The parity rule, by its properties and by its borders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.compilation.run.oracles import Noise, Oracle, comparable, noise_of, scale_of, terms_scale
from service.compilation.run.parity import Comparison, Pairs, compare, compare_all, compare_running_on, equal
from service.compilation.run.parity_settings import ParitySettings
from service.compilation.run.sampling import KEPT, WHOLE, Key, copies_to_compare, signed_sums, spread
from service.jobs.spec.compile import Tolerance

TOLERANCE = Tolerance()
LARGE = 2000


def verdict(result: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor | None, **oracle: Any) -> Comparison:
    scale = oracle.pop("scale", ParitySettings().judged_scale(scale_of(eager), scale_of(eager)))
    return compare(("gradient", "w"), 0, result, Oracle(eager, truth, scale, **oracle), TOLERANCE)


def terms_of(eager: torch.Tensor, truth: torch.Tensor) -> float:
    return terms_scale(scale_of(eager), scale_of(eager.double() - truth.double()), eager.dtype)


def sample(seed: int, size: int = LARGE, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 values and their float32 rounding."""
    truth = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return truth.float(), truth


@given(seed=st.integers(0, 10_000), exponent=st.integers(-20, 3))
def test_the_same_result_always_passes(seed: int, exponent: int) -> None:
    eager, truth = sample(seed, scale=10.0**exponent)
    found = verdict(eager.clone(), eager, truth)
    assert found.passed
    assert found.excess == found.max_abs == 0 or found.ratio == 1


ODD = torch.tensor([1.0, -0.0, float("inf"), -float("inf")])


@pytest.mark.parametrize("eager", [ODD, ODD[2:], ODD[:0], torch.arange(3), sample(1)[0]], ids=str)
@pytest.mark.parametrize("truth", [None, "exact", "infinite", "another shape"])
@pytest.mark.parametrize("noise", [Noise(), Noise(0.01, 0.01), Noise(9.0, 9.0)])
def test_what_is_equal_to_the_last_bit_is_judged_as_all_else(
    eager: torch.Tensor, truth: str | None, noise: Noise
) -> None:
    known = {"exact": eager.double(), "infinite": eager.double() / 0, "another shape": torch.zeros(7)}
    oracle = Oracle(eager, known[truth] if truth else None, scale_of(eager), noise)
    assert equal(("output", "y"), 3, eager.clone(), oracle) == compare(("output", "y"), 3, eager, oracle, TOLERANCE)


def test_whole_numbers_that_are_one_in_float64_differ() -> None:
    eager = torch.tensor([2**60])
    assert not verdict(eager + 1, eager, None).passed
    assert verdict(eager + 1, eager, None, noise=noise_of(eager, eager + 1)).passed, "as two eager runs do"


def test_what_differs_in_shape_type_or_bit_is_not_equal() -> None:
    oracle = Oracle(ODD, None, 1.0)
    for other in (ODD[:3], ODD.double(), ODD.nextafter(torch.tensor(5.0)), ODD * float("nan")):
        assert equal(("output", "y"), 0, other, oracle) is None


@given(seed=st.integers(0, 10_000), exponent=st.integers(-12, 0), error=st.floats(0.01, 10))
def test_a_relative_error_is_found_at_every_scale(seed: int, exponent: int, error: float) -> None:
    eager, truth = sample(seed, scale=10.0**exponent)
    assert not verdict(eager * (1 + error), eager, truth).passed


@given(seed=st.integers(0, 10_000), noise=st.floats(1e-3, 1e-1))
def test_a_result_as_far_from_the_truth_as_eager_passes_however_far_from_eager(seed: int, noise: float) -> None:
    _, truth = sample(seed)
    errors = torch.randn(2, LARGE, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) * noise
    eager, result = (truth + errors[0]).float(), (truth + errors[1]).float()
    found = verdict(result, eager, truth)
    assert found.max_abs > TOLERANCE.absolute
    assert found.passed
    assert not verdict(result, eager, None).passed


@given(seed=st.integers(0, 10_000), times=st.floats(2.5, 100))
def test_a_result_further_from_the_truth_than_the_ratio_fails(seed: int, times: float) -> None:
    _, truth = sample(seed)
    errors = torch.randn(2, LARGE, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) * 1e-2
    found = verdict((truth + errors[1] * times).float(), (truth + errors[0]).float(), truth)
    assert not found.passed
    assert found.ratio == pytest.approx(times, rel=0.2)


def test_small_tensors_are_given_a_larger_ratio() -> None:
    assert [ParitySettings().ratio(size, 2.0) for size in (10, 11, 500, 501, 1000, 1001)] == [10, 8, 8, 3, 3, 2]


def test_a_tensor_of_pure_rounding_noise_is_judged_at_its_siblings_scale() -> None:
    """The bias before a normalisation: its true gradient is zero, and each run leaves other rounding."""
    truth = torch.zeros(LARGE, dtype=torch.float64)
    eager, result = torch.zeros(LARGE), torch.full((LARGE,), 1e-8)
    assert verdict(result, eager, truth, scale=ParitySettings().judged_scale(0.0, largest=0.1)).passed
    assert not verdict(result * 1e3, eager, truth, scale=ParitySettings().judged_scale(0.0, largest=0.1)).passed


def cancelling(seed: int, terms: float, wrong: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What float32 leaves of sums of terms of that size which cancel: in another order, in eager, and in truth."""
    truth = torch.zeros(8, dtype=torch.float64)
    drawn = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)) * terms * torch.finfo(torch.float32).eps
    return drawn[0] * 30 + wrong * terms, drawn[1], truth


@given(seed=st.integers(0, 10_000), exponent=st.integers(-6, 0))
def test_the_scale_of_a_tensor_whose_terms_cancel_is_that_of_its_terms(seed: int, exponent: int) -> None:
    terms = 10.0**exponent
    for wrong, passes in ((0.0, True), (0.01, False)):
        result, eager, truth = cancelling(seed, terms, wrong)
        scale = ParitySettings().judged_scale(scale_of(eager), 0.3 * terms, terms_of(eager, truth))
        assert verdict(result, eager, truth, scale=scale).passed == passes


@given(seed=st.integers(0, 10_000))
def test_terms_that_cancel_in_part_may_be_added_in_another_order(seed: int) -> None:
    """As the gradient of a weight before a normalisation: eager lacks a digit, and sums in another order lack two."""
    truth = torch.randn(LARGE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-2
    lost = torch.randn(2, LARGE, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    unit = 1e-2 * torch.finfo(torch.float32).eps
    eager, result = (truth + 12 * unit * lost[0]).float(), (truth + 600 * unit * lost[1]).float()
    own = scale_of(eager)
    scale = ParitySettings().judged_scale(own, 20 * own, terms_of(eager, truth))
    assert verdict(result, eager, truth, scale=scale).passed
    assert not verdict(result, eager, truth, scale=own).passed
    assert not verdict(result * 1.01, eager, truth, scale=scale).passed
    assert terms_of((truth + 2 * unit * lost[0]).float(), truth) == 0


def test_a_tensor_with_any_right_digit_is_judged_at_its_own_scale() -> None:
    eager, truth = sample(3)
    assert terms_of(eager, truth) == 0.0
    assert terms_of(torch.arange(4), torch.arange(4)) == 0.0


@pytest.mark.parametrize(("off", "drift", "passes"), [(1e-4, 0.0, True), (5e-2, 0.0, False), (5e-2, 5e-3, True)])
def test_where_iterations_go_on_from_each_other_results_may_drift_as_eager_has(
    off: float, drift: float, passes: bool
) -> None:
    eager, truth = sample(4)
    key = ("output", "y")
    pair = eager * (1 + off), Oracle(eager, truth, 1.0, drift=drift)
    found = compare_running_on({key: pair}, 9, TOLERANCE)[key]
    assert found.passed == passes


@pytest.mark.parametrize("judge", [compare_all, compare_running_on])
@pytest.mark.parametrize(("value", "wrong"), [(0.0, 5.0), (1e308, -1e308), (1e155, 0.99e155)])
def test_neither_zero_nor_an_overflow_excuses_a_difference(
    judge: Callable[[Pairs, int, Tolerance], dict[Key, Comparison]], value: float, wrong: float
) -> None:
    eager, key = torch.tensor([value], dtype=torch.float64), ("output", "y")
    oracle = Oracle(eager, eager, scale_of(eager), drift=1e-6)
    (found,) = judge({key: (torch.full_like(eager, wrong), oracle)}, 9, TOLERANCE).values()
    assert found.excess > 1
    (same,) = judge({key: (eager.clone(), oracle)}, 9, TOLERANCE).values()
    assert (same.passed, same.note) == (True, "")


@pytest.mark.parametrize(("result", "passes"), [(2e-7, True), (5.0, False)])
def test_a_zero_of_eager_may_drift_as_far_as_it_is_from_float64(result: float, passes: bool) -> None:
    eager, key = torch.zeros(1), ("loss", "hinge")
    oracle = Oracle(eager, torch.tensor([1e-7], dtype=torch.float64), 0.0, drift=1e-6, rounding=1e-7)
    (found,) = compare_running_on({key: (eager + result, oracle)}, 9, TOLERANCE).values()
    assert found.passed == passes


def test_noise_of_eager_itself_is_tolerated() -> None:
    eager, _ = sample(1)
    assert not verdict(eager + 0.01, eager, None).passed
    assert verdict(eager + 0.01, eager, None, noise=Noise(0.02, 0.01)).passed


@given(seed=st.integers(0, 10_000), exponent=st.integers(-6, 3), part=st.floats(0.001, 1.0))
def test_noise_of_a_fair_part_of_the_scale_proves_nothing(seed: int, exponent: int, part: float) -> None:
    eager, truth = sample(seed, scale=10.0**exponent)
    generator = torch.Generator().manual_seed(seed + 1)
    again = eager + torch.randn(LARGE, generator=generator) * part * 10.0**exponent
    noise = noise_of(eager, again)
    found = verdict(eager.clone(), eager, truth, noise=noise)
    assert found.noise == pytest.approx(part, rel=0.1)
    assert found.excess <= 1
    assert found.is_noisy == (noise.rms > 0.05 * scale_of(eager))
    assert found.passed != found.is_noisy


@given(seed=st.integers(0, 10_000), error=st.floats(0.06, 10))
def test_noise_of_a_few_elements_does_not_hide_errors_of_all(seed: int, error: float) -> None:
    eager, truth = sample(seed)
    again = eager.clone()
    again[3] += 1  # of 2000 elements: 2 % of the scale over all, and the whole of it here
    noise = noise_of(eager, again)
    assert verdict(eager.clone(), eager, truth, noise=noise).passed
    found = verdict(eager * (1 + error), eager, truth, noise=noise)
    assert not found.passed
    assert found.excess > 1
    assert found.is_noisy == bool(found.max_abs <= noise.peak)


def test_eager_runs_that_cannot_be_compared_are_infinitely_far_apart() -> None:
    one = torch.tensor([1.0, math.nan, math.inf])
    assert noise_of(one, one) == Noise()
    assert noise_of(one, torch.tensor([1.0, math.nan, 2.0])).peak == math.inf
    assert noise_of(one, one[:2]).rms == math.inf
    assert verdict(one, one, None, noise=noise_of(one, one[:2])).is_noisy


@given(seed=st.integers(0, 1000), size=st.sampled_from([KEPT + 1, 2 * KEPT + 12345]), error=st.floats(1e-2, 1))
def test_what_a_sample_of_a_large_tensor_misses_its_sums_show(seed: int, size: int, error: float) -> None:
    eager, truth = sample(seed, size)
    wrong = eager.clone()
    wrong[1:size:2] *= 1 + error
    wrong[:: (size // KEPT + 1) | 1] = eager[:: (size // KEPT + 1) | 1]  # right where the sample looks
    looked_at = [copies_to_compare([("gradient", "w", each)]) for each in (wrong, eager, truth)]
    assert [kind for kind, _ in looked_at[0]] == ["gradient", "gradient (whole)"]
    sampled, whole = ([each["gradient" + kind, "w"] for each in looked_at] for kind in ("", WHOLE))
    assert verdict(*sampled).passed
    assert not verdict(*whole).passed
    assert verdict(whole[1], whole[1], whole[2]).passed


@given(seed=st.integers(0, 1000), noise=st.floats(1e-6, 1e-1))
def test_signed_sums_keep_size_and_distances(seed: int, noise: float) -> None:
    one, _ = sample(seed, KEPT + 999)
    other = one + torch.randn(len(one), generator=torch.Generator().manual_seed(seed)) * noise
    assert scale_of(signed_sums(one)) == pytest.approx(scale_of(one), rel=0.1)
    assert scale_of(signed_sums(one) - signed_sums(other)) == pytest.approx(scale_of(one - other), rel=0.1)
    turned = one.flip(0)  # of the same norm
    assert not verdict(signed_sums(turned), signed_sums(one), None).passed


@pytest.mark.parametrize(
    ("result", "note"),
    [
        (torch.zeros(3), "shape (3,) instead of (2,)"),
        (torch.zeros(2, dtype=torch.float64), "dtype torch.float64 instead of torch.float32"),
        (torch.tensor([0.0, math.nan]), "NaN or infinity"),
    ],
)
def test_another_shape_dtype_or_finiteness_is_never_within_tolerance(result: torch.Tensor, note: str) -> None:
    found = verdict(result, torch.zeros(2), None)
    assert not found.passed
    assert note in found.note


def test_infinities_must_agree_in_sign_and_nan_matches_nan() -> None:
    eager = torch.tensor([math.inf, math.nan, 1.0])
    assert verdict(eager.clone(), eager, None).passed
    assert not verdict(torch.tensor([-math.inf, math.nan, 1.0]), eager, None).passed
    assert not verdict(torch.tensor([math.nan, math.nan, 1.0]), eager, None).passed


def test_whole_numbers_and_empty_tensors_are_compared_too() -> None:
    assert verdict(torch.arange(4), torch.arange(4), None).passed
    assert not verdict(torch.arange(4) + 1, torch.arange(4), None).passed
    assert verdict(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.float64)).passed


def test_whole_numbers_are_right_or_wrong_however_large() -> None:
    tokens = torch.arange(20_000, 20_100)
    assert verdict(tokens.clone(), tokens, tokens).passed
    assert not verdict(tokens + 1, tokens, tokens).passed
    assert not verdict(tokens + 1, tokens, None).passed


@pytest.mark.parametrize("shape", [(3, 5), (KEPT // 64 + 1, 64)])
def test_a_sample_is_spread_where_it_was_taken(shape: tuple[int, int]) -> None:
    value = torch.randn(shape)
    sampled = copies_to_compare([("gradient", "x", value)])["gradient", "x"]
    whole = spread(sampled, value)
    assert torch.equal(whole[whole != 0], value[whole != 0])
    assert whole.count_nonzero() == sampled.numel() > 0


@given(size=st.sampled_from([5, KEPT + 1]))
def test_both_parts_of_complex_numbers_are_compared(size: int) -> None:
    eager = torch.randn(size, dtype=torch.complex64, generator=torch.Generator().manual_seed(size))
    looked_at = [copies_to_compare([("output", "z", each)]) for each in (eager, eager.clone(), eager.conj())]
    for key, value in looked_at[0].items():
        assert verdict(looked_at[1][key], value, None).passed
        assert not verdict(looked_at[2][key], value, None).passed


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_compared_by_their_numbers_and_the_sizes_of_their_parts(layout: torch.layout) -> None:
    """Those of other parts may have the same numbers."""
    parts = ([*torch.arange(6.0).split_with_sizes(rows)] for rows in ([2, 4], [3, 3]))
    nested = (torch.nested.nested_tensor(each, layout=layout) for each in parts)
    one, other = (copies_to_compare([("output", "z", each)]) for each in nested)
    assert torch.equal(one["output", "z"], torch.arange(6.0))
    assert torch.equal(one["output", "z"], other["output", "z"])
    assert one["output", "z (sizes)"].tolist() == [[2], [4]]
    assert other["output", "z (sizes)"].tolist() == [[3], [3]]


def test_another_computation_in_float64_is_told_from_rounding() -> None:
    eager, truth = sample(2)
    assert comparable(eager, truth)
    assert not comparable(eager, truth.roll(1))
    assert not comparable(eager, truth[:-1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_each_element_of_many_whole_numbers_counts(dtype: torch.dtype) -> None:
    """One that the sample leaves out, too."""
    whole = torch.arange(3 * KEPT) % 2
    other = whole.clone()
    other[-2] += 1 if whole[-2] == 0 else -1
    one, two = (copies_to_compare([("output", "n", each.to(dtype))]) for each in (whole, other))
    assert torch.equal(one["output", "n"], two["output", "n"])
    eager = one["output" + WHOLE, "n"]
    compared = compare(("output", "n"), 0, two["output" + WHOLE, "n"], Oracle(eager, None, scale_of(eager)), TOLERANCE)
    assert (compared.passed, compared.max_abs) == (False, 1)
