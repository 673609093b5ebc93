"""One search on one device and on all: what ``verify_mesh.py --cases search`` measures.

Each rank decides its share of the instances alone, all at the same time; then all ranks decide each together. It asks
whether the output of a random ReLU network exceeds a limit, which lies between the largest output that an ascent
reaches and CROWN's bound: the share ``--above`` says where, and thereby how many domains a proof takes. Several shares
and seeds are searched one after the other; one process alone shows which of them take long enough to be worth ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch import nn

from service.bounds.interval import Interval
from service.bounds.methods import CROWN, BoundOptions
from service.bounds.network import prepare
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.parallel.mesh import Mesh
from service.verification.bab.decision import Decision
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import SINGLE_RANK, SearchGroup
from service.verification.engine import NetworkEngine

STARTS, ASCENT = 256, 100
COLUMNS = (
    "| search | ranks | verdict | decided by | seconds | domains | domains/s | seconds: × | domains: × | domains/s: × |"
)
WARM_SECONDS = 3.0
"""A first, short decision loads kernels and sets up collectives."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, and a query that it satisfies."""

    model: ModelUnderVerification
    query: Query

    @classmethod
    def of(cls, given: argparse.Namespace, seed: int, above: float, device: torch.device) -> Problem:
        widths = [given.inputs, *[given.width] * given.depth, 1]
        module = _random_net(widths, seed).to(device).eval().requires_grad_(False)
        network = prepare(module, (given.inputs,))
        box = Interval(
            torch.full((1, given.inputs), -given.radius, device=device),
            torch.full((1, given.inputs), given.radius, device=device),
        )
        reached = _ascend(module, box)
        bound = CROWN(network, box, BoundOptions()).lower_bounds(-torch.ones(1, 1, 1, device=device))
        limit = reached + above * (-float(bound) - reached)
        ends = (-given.radius,) * given.inputs, (given.radius,) * given.inputs
        query = Query(given.inputs, 1, (Disjunct(*ends, (Halfspace(((0, -1.0),), -limit),)),))
        in_double = _random_net(widths, seed).to(device).double().eval().requires_grad_(False)
        engine = NetworkEngine(network, device=device)
        return cls(ModelUnderVerification(module, engine, in_double, None, torch.float32), query)


def _random_net(widths: list[int], seed: int) -> nn.Sequential:
    generator, layers = torch.Generator().manual_seed(seed), list[nn.Module]()
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(outputs, inputs, generator=generator) * (2 / inputs) ** 0.5)
            linear.bias.copy_(0.1 * torch.randn(outputs, generator=generator))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _ascend(module: nn.Module, box: Interval) -> float:
    """Return the largest output that an ascent from random inputs reaches."""
    shares = torch.rand(STARTS, box.lower.shape[1], generator=torch.Generator().manual_seed(1)).to(box.lower.device)
    x, most = box.lower + shares * box.width, -torch.inf
    for step in range(ASCENT):
        outputs = module(x.requires_grad_())
        most = max(most, float(outputs.detach().max()))
        (gradient,) = torch.autograd.grad(outputs.sum(), x)
        x = box.nearest(x.detach() + 0.2 * (1 - step / ASCENT) * box.width * gradient.sign())
    return most


def measure_search(mesh: Mesh, device: torch.device, given: argparse.Namespace) -> None:
    """Print a line for each search by one rank and by all, with the ratios between them."""
    cases = list(product(given.seed, given.above))
    _decide(Problem.of(given, *cases[0], device), SINGLE_RANK, min(WARM_SECONDS, given.limit), device)
    found = {
        each: _decide(Problem.of(given, *each, device), SINGLE_RANK, given.limit, device)
        for each in cases[mesh.rank :: mesh.dp.size]
    }
    if mesh.rank == 0:
        print(COLUMNS + "\n" + "|---" * (COLUMNS.count("|") - 1) + "|", flush=True)
    gathered: list[dict[tuple[int, float], Decision]] = [found]
    if mesh.dp.size > 1:
        gathered *= mesh.dp.size
        dist.all_gather_object(gathered, found)
        _decide(Problem.of(given, *cases[0], device), SearchGroup(mesh.dp), min(WARM_SECONDS, given.limit), device)
    alone = {case: each for part in gathered for case, each in part.items()}
    for case in cases:
        _print_case(mesh, device, given, case, alone[case])


def _print_case(
    mesh: Mesh, device: torch.device, given: argparse.Namespace, case: tuple[int, float], alone: Decision
) -> None:
    """Print what one rank found, and what all find together if there are several."""
    found = {1: alone}
    if mesh.dp.size > 1:
        dist.barrier()
        found[mesh.dp.size] = _decide(Problem.of(given, *case, device), SearchGroup(mesh.dp), given.limit, device)
    if mesh.rank == 0:
        seed, above = case
        network = f"{given.inputs}-{given.depth}x{given.width}, seed {seed}, above {above:g}"
        for ranks, each in found.items():
            print(_line(network, ranks, each, alone), flush=True)


def _decide(problem: Problem, group: SearchGroup, limit: float, device: torch.device) -> Decision:
    """Return what was decided, less its points: they lie on the device of one rank."""
    found = decide(replace(problem.model, search_group=group), problem.query, CROWN, limit)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return replace(found, counterexample=None, visited=None)


def _line(network: str, ranks: int, found: Decision, alone: Decision) -> str:
    rate, base = found.domains / found.seconds, alone.domains / alone.seconds
    return (
        f"| {network} | {ranks} | {found.verdict.value} | {found.technique.value} | {found.seconds:.1f} "
        f"| {found.domains:,} | {rate:,.0f} | {alone.seconds / found.seconds:.2f} "
        f"| {found.domains / alone.domains:.2f} | {rate / base:.2f} |"
    )
