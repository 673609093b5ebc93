"""Measures bounds of one wide network on 1, 2, 4 … devices: seconds, and the peak memory of a device.

    torchrun --nproc-per-node P benchmarks/verify_mesh.py [--device cuda] [--cases mlp transformer] [--small]
        [--dim 3072] [--layers 1] [--tokens 4] [--batch 1]
    torchrun --nproc-per-node P benchmarks/verify_mesh.py --cases too-wide [--gib 160] [--repeats 2]
    torchrun --nproc-per-node P benchmarks/verify_mesh.py --cases search [--inputs 100] [--width 64] [--depth 4]
        [--radius 0.1] [--above 0.3 ...] [--seed 0 ...] [--limit 500]

Weights are the same on any number of ranks, so the printed mean width must not change; all output bounds, both
sides, by CROWN with its own bounds before every non-linear operator. Each rank draws its own part of the weights on its
device, so that ``too-wide`` needs no more of the host. ``search`` decides each instance on one rank and then on all of
them, in the same call; without ``torchrun`` only on one (``mesh_search.py``).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from mesh_search import measure_search
from torch import Tensor, nn

from service.bounds.full_float32 import forbid_tf32
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.rank_group import RankGroup
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.families.mlp import MlpConfig
from service.jobs.spec.families.transformer import TransformerConfig
from service.models import build
from service.models.transformer import AfterEmbedding, Transformer
from service.parallel import distributed
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.parallel.tensor.placement import local

Made = tuple[nn.Module, tuple[int, ...], float]


def mlp(mesh: Mesh, device: torch.device, given: argparse.Namespace) -> Made:
    """Two blocks of a wide hidden layer between narrow ones."""
    narrow, wide = (64, 512) if given.small else (2048, 65536)
    config = MlpConfig(in_features=narrow, hidden=(wide, narrow, wide, narrow), out_features=16)
    return build(config, mesh, device=device), (narrow,), 1e-4


def transformer(mesh: Mesh, device: torch.device, given: argparse.Namespace) -> Made:
    """Blocks on the embedded tokens of a sequence."""
    tokens, dim, layers = (4, 32, 1) if given.small else (given.tokens, given.dim, given.layers)
    heads = max(4, dim // 128)
    config = TransformerConfig(
        vocab_size=64, dim=dim, layers=layers, heads=heads, kv_heads=heads, ffn_dim=4 * dim, max_sequence=tokens
    )
    module = build(config, mesh, device=device)
    assert isinstance(module, Transformer)
    return AfterEmbedding(module, tokens), (tokens, dim), 1e-4


def too_wide(mesh: Mesh, device: torch.device, given: argparse.Namespace) -> Made:
    """One hidden layer of ``--gib`` GiB of weights, 160 of which two devices hold and one does not."""
    narrow = 2**13
    wide = round(given.gib * 2**28 / narrow)
    config = MlpConfig(in_features=narrow, hidden=(wide,), out_features=16)
    return build(config, mesh, device=device), (narrow,), 1e-4


CASES: Mapping[str, Callable[[Mesh, torch.device, argparse.Namespace], Made]] = {
    "mlp": mlp,
    "transformer": transformer,
    "too-wide": too_wide,
}


SEARCH = "search"


def measure(name: str, mesh: Mesh, device: torch.device, given: argparse.Namespace) -> None:
    module, shape, eps = CASES[name](mesh, device, given)
    module.eval().requires_grad_(False)
    network = prepare(module, shape, mesh.tp)
    generator = torch.Generator().manual_seed(5)
    centre = torch.randn(given.batch, *shape, generator=generator).to(device)
    box = Interval(centre - eps, centre + eps)
    identity = torch.eye(network.graph.output.size, device=device)
    rows = torch.cat([identity, -identity])[None]
    seconds, options = [], BoundOptions(elements=given.elements // mesh.tp.size)
    for repeat in range(given.repeats + 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        found, spent = _timed(lambda: METHODS["crown"](network, box, options).lower_bounds(rows), device)
        seconds += [spent] if repeat else []
    weights = sum(each.numel() * each.element_size() for each in map(local, module.parameters()))
    peaks = RankGroup(mesh.tp).gather(torch.tensor([_peak_bytes(device) // 2**20], device=device), 0).tolist()
    if mesh.tp.rank == 0:
        lower, negated = found.chunk(2, dim=1)
        print(
            f"| {name} | {mesh.tp.size} | {(-negated - lower).double().mean():.6g} | {statistics.median(seconds):.4g} "
            f"| {', '.join(map(str, peaks))} | {weights / 2**20:.0f} |",
            flush=True,
        )


def _peak_bytes(device: torch.device) -> int:
    """Return the most memory of the device that was in use; on a CPU, of the whole process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def _timed(bound: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    found = bound()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found, time.perf_counter() - started


def _measure_bounds(names: list[str], mesh: Mesh, device: torch.device, given: argparse.Namespace) -> None:
    if mesh.tp.rank == 0:
        print("| network | tp | mean width | seconds | peak MiB of each rank | weights MiB of one |")
        print("|---" * 6 + "|", flush=True)
    for name in names:
        measure(name, mesh, device, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=[*CASES, SEARCH], default=["mlp", "transformer"])
    parser.add_argument("--small", action="store_true")
    for name, default in (("--dim", 3072), ("--layers", 1), ("--tokens", 4)):
        parser.add_argument(name, type=int, default=default, help="of the transformer")
    parser.add_argument("--batch", type=int, default=1, help="boxes together")
    parser.add_argument("--gib", type=float, default=160, help="of the weights of too-wide, over all ranks")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--elements", type=int, default=2**28, help="of one coefficient tensor, over all ranks")
    for name, default in (("--inputs", 100), ("--width", 64), ("--depth", 4)):
        parser.add_argument(name, type=int, default=default, help="of the network that is searched")
    parser.add_argument("--radius", type=float, default=0.1, help="of the box that is searched")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of each network that is searched")
    above = "where each search's limit is: 0 reached, 1 proved by CROWN"
    parser.add_argument("--above", type=float, nargs="+", default=[0.3], help=above)
    parser.add_argument("--limit", type=float, default=500, help="seconds of a search; ranks that wait give up at 600")
    given = parser.parse_args()
    forbid_tf32()
    device = distributed.start(given.device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if names := [name for name in given.cases if name != SEARCH]:
        _measure_bounds(names, build_mesh(ParallelSpec(tp=ranks), given.device), device, given)
    if SEARCH in given.cases:
        measure_search(build_mesh(ParallelSpec(dp_shard=ranks), given.device), device, given)
    distributed.stop()


if __name__ == "__main__":
    main()
