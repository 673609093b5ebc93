"""The same bounds as auto_LiRPA, another verifier, on a network with stored weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lanes import slow_but_for
from nets import output_bounds
from safetensors.torch import load_file
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network, prepare
from service.bounds.onnx import load
from service.verification.properties.robustness import margin_rows

PEER_NAMES = {"ibp": "IBP", "crown-ibp": "CROWN-IBP", "crown": "CROWN"}
PLAIN = BoundOptions(intersect=False)  # the peer replaces intermediate bounds, it does not intersect them
CASES = [
    (method, batch, dtype)
    for method in PEER_NAMES
    for batch in (1, 32, 256)
    for dtype in (torch.float32, torch.float64)
    if (method, batch) != ("crown", 256) or dtype == torch.float32
]


def network_a(parity: Path, dtype: torch.dtype) -> nn.Module:
    """784-256-256-256-10 with ReLU."""
    state = load_file(parity / "model_a.safetensors")
    weights = sorted(name for name in state if name.endswith("weight"))
    layers: list[nn.Module] = []
    for name in weights:
        outputs, inputs = state[name].shape
        layer = nn.Linear(inputs, outputs, dtype=dtype)
        layer.load_state_dict({"weight": state[name], "bias": state[name.replace("weight", "bias")]})
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def inputs_a(parity: Path, batch: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    stored = np.load(parity / "inputs_a.npz")
    return torch.tensor(stored["u8"][:batch]).flatten(1).to(dtype) / 255, float(stored["eps"])


@pytest.fixture(scope="module")
def networks(parity: Path) -> dict[torch.dtype, Network]:
    return {dtype: prepare(network_a(parity, dtype), (784,)) for dtype in (torch.float32, torch.float64)}


def peer(parity: Path, method: str, batch: int, rows: str) -> dict[str, Tensor]:
    stored = np.load(parity / "bounds" / f"a_{PEER_NAMES[method]}_b{batch}_{rows}.npz")
    return {name: torch.tensor(stored[name]).double() for name in stored}


def assert_equal_to_rounding(found: Tensor, expected: Tensor) -> None:
    """2e-5 of the bounds' size: what float32 costs the peer, measured against float64."""
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("method", "batch", "dtype"), slow_but_for(CASES, *((method, 32, torch.float32) for method in PEER_NAMES))
)
def test_output_bounds(
    parity: Path, networks: dict[torch.dtype, Network], method: str, batch: int, dtype: torch.dtype
) -> None:
    x, eps = inputs_a(parity, batch, dtype)
    found = output_bounds(networks[dtype], Interval(x - eps, x + eps), method, PLAIN)
    expected = peer(parity, method, batch, "id")
    assert_equal_to_rounding(found.lower, expected["lb"])
    assert_equal_to_rounding(found.upper, expected["ub"])


@pytest.mark.parametrize("method", PEER_NAMES)
def test_margins(parity: Path, networks: dict[torch.dtype, Network], method: str) -> None:
    x, eps = inputs_a(parity, 32, torch.float32)
    expected = peer(parity, method, 32, "margin")
    rows = margin_rows(expected["y"].argmax(dim=1), 10, torch.float32)
    found = METHODS[method](networks[torch.float32], Interval(x - eps, x + eps), PLAIN).lower_bounds(rows)
    assert_equal_to_rounding(found, expected["lb"])


FIXED = "alpha-crown (fixed intermediate bounds)"


@pytest.mark.parametrize(("stored", "method"), [("alpha-CROWN", "alpha-crown"), ("alpha-CROWN-last", FIXED)])
def test_optimised_bounds_are_no_looser(
    parity: Path, networks: dict[torch.dtype, Network], stored: str, method: str
) -> None:
    """By no more than 1e-3, from the same number of iterations: both end before the best slopes."""
    x, eps = inputs_a(parity, 1, torch.float32)
    found = output_bounds(networks[torch.float32], Interval(x - eps, x + eps), method, BoundOptions())
    peers = np.load(parity / "bounds" / f"a_{stored}_b1_id.npz")
    lower, upper = (torch.tensor(peers[name]).double() for name in ("lb", "ub"))
    assert bool((found.lower >= lower - 1e-3 * lower.abs().max()).all())
    assert bool((found.upper <= upper + 1e-3 * upper.abs().max()).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["c", "e_plain"])
def test_optimised_bounds_of_convolutions_and_attention_are_no_looser(parity: Path, name: str) -> None:
    module = load((parity / f"model_{name}.onnx").read_bytes())
    stored = np.load(parity / f"inputs_{name}.npz")
    x, eps = torch.tensor(stored["u8"][:1]).flatten(1).float() / 255, float(stored["eps"])
    x = 2 * x - 1 if name == "e_plain" else x
    found = output_bounds(
        prepare(module, (module.features,)), Interval(x - eps, x + eps), "alpha-crown", BoundOptions()
    )
    peers = np.load(parity / "bounds" / f"{name}_alpha-CROWN_b1_id.npz")
    lower, upper = (torch.tensor(peers[end]).double() for end in ("lb", "ub"))
    assert bool((found.lower >= lower - 1e-3 * lower.abs().max()).all())
    assert bool((found.upper <= upper + 1e-3 * upper.abs().max()).all())
