"""A residual stream divided by tokens, and the loss over a divided vocabulary, on two ranks against one process."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from divided_tensors import whole
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import TransformerConfig
from service.models import build
from service.models.parallelize import Choice, apply_activation_checkpoint
from service.parallel import distributed, mesh
from service.parallel.collectives import gather_from_group
from service.parallel.tensor import local, vocabulary, vocabulary_parallel_cross_entropy

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-10
GROUPED = TransformerConfig(vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, max_sequence=12)
EVERY_HEAD = TransformerConfig(vocab_size=16, dim=24, layers=1, heads=4, ffn_dim=16, max_sequence=12)
LAYOUTS = {
    "several samples": (GROUPED, 3, 8),
    "one sample": (GROUPED, 1, 2),
    "as many keys as queries": (EVERY_HEAD, 2, 12),
    "an odd sequence": (GROUPED, 2, 7),
    "one token": (EVERY_HEAD, 4, 1),
}
ROWS, VOCABULARY = 24, 10
CHUNKS = {"one row": 1, "seven of 24 rows": 7, "twelve of 24 rows": 12, "all rows": 24, "more than all": 25}


class Collectives(TorchDispatchMode):
    """Counts the collectives that run, forward or backward, recomputed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.namespace == "trivet":
            self.counts[function._schema.name.removeprefix("trivet::")] += 1
        return function(*arguments, **(keywords or {}))


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found
    return max(float((whole(found[name]) - wanted[name]).abs().max()) for name in found)


def model(config: TransformerConfig, grid: mesh.Mesh | None) -> nn.Module:
    """Norms have weights of many values, and others are large enough for every part to matter."""
    built = build(config, grid, dtype=torch.float64, seed=3)
    for name, parameter in built.named_parameters():
        own = local(parameter).detach()
        own.copy_(torch.linspace(0.5, 2, len(own)).double()) if "norm" in name else own.mul_(8)
    return built


def gradients(built: nn.Module, *, norms: bool) -> dict[str, Tensor]:
    return {name: p.grad for name, p in built.named_parameters() if p.grad is not None and norms == ("norm" in name)}


def check_layout(grid: mesh.Mesh, config: TransformerConfig, batch: int, sequence: int) -> dict[str, Any]:
    dense, parallel = model(config, None), model(config, grid)
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, config.vocab_size, (2, batch, sequence))
    expected = dense(tokens)
    streams = []
    handles = [
        block.register_forward_pre_hook(lambda _, inputs: streams.append(list(inputs[0].shape)))
        for block in parallel.blocks.values()
    ]
    shard = parallel(tokens)
    for handle in handles:
        handle.remove()
    wanted = functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss = vocabulary_parallel_cross_entropy(shard, targets, parallel.output_axis)
    wanted.backward()
    loss.backward()
    assert all(parameter.grad is not None for parameter in parallel.parameters())
    return {
        "logits": worst({"": gather_from_group(shard, -1, grid.tp.group, 2)}, {"": expected}),
        "loss": abs(float(loss - wanted)),
        "norms": worst(gradients(parallel, norms=True), gradients(dense, norms=True)),
        "others": worst(gradients(parallel, norms=False), gradients(dense, norms=False)),
        "streams": streams,
    }


def check_recomputed(grid: mesh.Mesh) -> dict[str, Any]:
    """How often collectives run in a forward and a backward pass, and that gradients stay."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, 32, (2, 3, 8))
    plain, counts, found = {}, {}, {}
    for choice in ("none", *get_args(Choice)):
        built = model(GROUPED, grid)
        if choice != "none":
            apply_activation_checkpoint(built, choice)
        with Collectives() as collectives:
            vocabulary_parallel_cross_entropy(built(tokens), targets, grid.tp).backward()
        counts[choice] = dict(collectives.counts)
        own = {name: local(p.grad) for name, p in built.named_parameters()}
        plain = plain or own
        found[choice] = worst(own, plain)
    return {"counts": counts, "distances": found}


def check_loss(grid: mesh.Mesh, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """``rows`` at a time of 24, over two halves of a vocabulary; gradients are relative to their largest."""
    torch.manual_seed(2)
    width = VOCABULARY // 2
    columns = slice(grid.tp.rank * width, (grid.tp.rank + 1) * width)
    logits = (torch.randn(4, 6, VOCABULARY, dtype=torch.float64) * 30).to(dtype).double().requires_grad_()
    targets = torch.randint(0, VOCABULARY, (4, 6))
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (3 * expected).backward()
    own = logits.detach()[..., columns].to(dtype).requires_grad_()
    with patch.object(vocabulary, "AT_ONCE", rows * width):
        loss = vocabulary_parallel_cross_entropy(own, targets, grid.tp)
        (3 * loss).backward()
    difference = own.grad.double() - logits.grad[..., columns]
    return {
        "loss": abs(float(loss.double() - expected)) / float(expected),
        "gradient": float(difference.abs().max() / logits.grad.abs().max()),
    }


def everything() -> dict[str, Any]:
    device = distributed.start("cpu")
    grid = mesh.build(ParallelSpec(tp=2), device.type)
    found = {
        "layouts": {name: check_layout(grid, *layout) for name, layout in LAYOUTS.items()},
        "recomputed": check_recomputed(grid),
        "losses": {name: check_loss(grid, rows, torch.float64) for name, rows in CHUNKS.items()},
        "bfloat16": check_loss(grid, 7, torch.bfloat16),
    }
    distributed.stop()
    return found


@pytest.fixture(scope="module")
def ranks(torchrun: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torchrun(everything, ranks=2)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_losses_and_all_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    config, batch, sequence = LAYOUTS[name]
    for found in (rank["layouts"][name] for rank in ranks):
        # Only a sequence that divides is cut; the tokens of every sample are then.
        own = sequence if sequence % 2 else sequence // 2
        assert found.pop("streams") == [[batch, own, config.dim]] * config.layers
        assert max(found.values()) < TOLERANCE, found


def test_selective_recomputation_repeats_no_collective(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["recomputed"] for rank in ranks):
        counts = found["counts"]
        assert max(found["distances"].values()) < 1e-13, found["distances"]
        assert counts["selective"] == counts["none"]
        # Each of two blocks gathers twice and scatters once more; its end needs no repetition.
        assert counts["full"]["gather_with_reduce_from_group"] == counts["none"]["gather_with_reduce_from_group"] + 4
        assert counts["full"]["reduce_scatter_to_group"] > counts["none"]["reduce_scatter_to_group"]


@pytest.mark.parametrize("name", CHUNKS)
def test_a_divided_loss_is_the_whole_one_whatever_is_computed_at_once(ranks: list[dict[str, Any]], name: str) -> None:
    for found in (rank["losses"][name] for rank in ranks):
        assert max(found.values()) < 1e-14, found


def test_a_divided_loss_of_bfloat16_logits_only_rounds_its_gradient(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["bfloat16"] for rank in ranks):
        assert found["loss"] < 1e-6
        # Probabilities are rounded to bfloat16, twice: 2 · 2⁻⁹.
        assert found["gradient"] < 2**-7
