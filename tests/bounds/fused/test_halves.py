"""Products of float32 in halves of float16, as accurate as in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from service.bounds.fused import building, halves


def wide_matrices(spread: float, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rows and a weight whose entries differ by many powers of two, beside each other and among rows and columns."""
    draws = torch.Generator().manual_seed(11)

    def number(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws).to(device)

    rows = number(130, 512) * torch.exp2(number(130, 512) * spread) * torch.exp2(number(130, 1) * spread)
    return rows, number(512, 256) * torch.exp2(number(512, 256) * min(spread, 2)) * torch.exp2(number(256) * spread)


def error_of(found: Tensor, rows: Tensor, weight: Tensor) -> float:
    """The largest error of a row's products together, as a share of the sizes of all their terms."""
    exact, size = rows.double() @ weight.double(), rows.double().abs() @ weight.double().abs()
    return float(((found - exact).abs().sum(dim=1) / size.sum(dim=1)).max())


@pytest.mark.parametrize("spread", [0.0, 2.0, 8.0])
def test_halves_of_a_weight_have_nearly_all_of_its_digits(spread: float) -> None:
    rows, weight = wide_matrices(spread)
    high, low, unscaled = halves.halves(weight)
    assert high.dtype == low.dtype == torch.float16
    assert high.isfinite().all()
    assert all(part.is_contiguous() for part in halves.halves(weight.mT.contiguous().mT))
    together = (high.double() + low.double()) * unscaled
    limit = weight.double().abs() * 2.0**-22 + weight.double().abs().amax(dim=0) * 2.0**-39
    assert ((together - weight).abs() <= limit).all()
    assert error_of(rows.double() @ together, rows, weight) < 2.0**-22
    assert not halves.is_worthwhile(len(rows), weight)
    assert halves.is_worthwhile(2**17, weight)
    assert not halves.is_worthwhile(2**17, weight[:, :-1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.cuda
@pytest.mark.parametrize("spread", [0.0, 2.0, 8.0])
def test_products_of_halves_are_as_accurate_as_those_of_float32(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    monkeypatch.setattr(building, "FEWEST", 0)
    monkeypatch.setattr(halves, "LEAST_WORK", 0)
    rows, weight = wide_matrices(spread, "cuda")
    rows[-1, 5] = torch.inf
    assert not halves.multiply(rows, weight)[-1].isfinite().any()
    rows = rows[:-1]
    found, plain = halves.multiply(rows, weight), rows @ weight
    assert not torch.equal(found, plain)
    torch.testing.assert_close(halves.multiply(rows, weight.mT.contiguous().mT, 2 * found), 3 * found)
    assert error_of(found, rows, weight) < max(2 * error_of(plain, rows, weight), 2.0**-19 if spread > 2 else 2.0**-22)
