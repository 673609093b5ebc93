"""Compiled FSDP2 trains like eager: modules of PyTorch's own and blocks, their hooks outside of the graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import slow_but_for
from launching import Torchrun

BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "inductor")
ITERATIONS = 10


def mlp(width: int = 16) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """A bare container, and each of its layers, which are sharded by themselves besides."""
    layers = [torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, width))
    return model, [layer for layer in model if isinstance(layer, torch.nn.Linear)]


def encoder(width: int = 16) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    layer = torch.nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, list(model.layers)


MODELS = {"mlp": mlp, "transformer": encoder}


CASES = [(family, backend) for family in MODELS for backend in BACKENDS]


def losses(cases: list[tuple[str, str]], device_type: str) -> list[dict[str, Any]]:
    """For each case the losses of this rank, eager and compiled, how many graphs there were, and the functions of FSDP2
    that were traced.
    """
    from service.parallel import distributed

    device = distributed.start(device_type)
    torch.set_num_threads(1)
    found = [trained(family, backend, device) for family, backend in cases]
    distributed.stop()
    return found


def trained(family: str, backend: str, device: torch.device) -> dict[str, Any]:
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from service.models.compiled import COMPILE_MODES, apply_compile

    torch.compiler.reset()
    counters.clear()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    found: dict[str, Any] = {"eager": [], "compiled": []}
    for name, seen in found.items():
        torch.manual_seed(0)
        model, parts = MODELS[family]()
        for part in [*parts, model.to(device)]:
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for iteration in range(ITERATIONS + 1):
            if iteration == 1 and name == "compiled":  # what FSDP2 makes at its first call is there
                apply_compile(model, COMPILE_MODES[backend].backend)
            generator = torch.Generator().manual_seed(100 * iteration + torch.distributed.get_rank())
            loss = model(torch.randn(4, 8, 16, generator=generator).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss))
    hooks = [reason for reason in counters["graph_break"] if "fsdp" in reason.lower()]
    return {**found, "graphs": counters["stats"]["unique_graphs"], "hooks": hooks}


def check(ranks: list[list[dict[str, Any]]], cases: list[tuple[str, str]]) -> None:
    for case, first, last in zip(cases, ranks[0], ranks[-1], strict=True):
        assert first["compiled"] == pytest.approx(first["eager"], rel=1e-5), case
        assert first["graphs"] > 0, case
        assert first["hooks"] == [], case
        assert len(ranks) == 1 or first["eager"] != last["eager"], case


@pytest.mark.distributed
@pytest.mark.parametrize("cases", slow_but_for([CASES[:1], CASES[1:]], CASES[:1]), ids=["one", "the others"])
def test_compiled_layers_and_blocks_train_like_eager(torchrun: Torchrun, cases: list[tuple[str, str]]) -> None:
    check(torchrun(losses, 2, cases=cases, device_type="cpu"), cases)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
def test_they_do_over_nccl(fresh_torchrun: Torchrun) -> None:
    """On as many GPUs as there are, two at most: NCCL gives two ranks no common device."""
    check(fresh_torchrun(losses, min(2, torch.cuda.device_count()), cases=CASES, device_type="cuda"), CASES)
