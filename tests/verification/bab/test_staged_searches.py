"""Searches through pipeline stages decide what one process does, by splits of values of any stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from nets import box_around, output_bounds

from service.bounds.methods import CROWN
from service.bounds.network import prepare
from service.bounds.stages import InStages, StageLink, prepare_stages
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig
from service.models import build
from service.parallel import distributed
from service.parallel.local_copy import local_copy
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.intermediate_bounds import bound_root
from service.verification.bab.activations.staged_objective import dual_objective
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import SearchGroup
from service.verification.bab.settings import ActivationSearchSettings, OptimiserSettings, SearchSettings
from service.verification.bab.specification import specifications
from service.verification.bab.time_plan import TimePlan
from service.verification.engine import NetworkEngine, StagesEngine

pytestmark = pytest.mark.distributed

SHARES = {"proved by splits": 0.3, "refuted": -0.05}
"""Where between the largest output that is reached and CROWN's bound a counterexample would have to be."""
MESHES = [{"pp": 4}, {"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}]
EPS = 0.1

CONFIG = MlpConfig(in_features=70, hidden=(8, 8, 8, 8), out_features=2)
PATIENT = SearchSettings(
    time=TimePlan(quick_seconds=1e9, quick_share=1e9, optimised_root_cost=float("inf")),
    activations=ActivationSearchSettings(from_scratch=OptimiserSettings(20, slope_step=0.1)),
)
"""One process would tighten what its domains share when it has searched for long, on a busy host at once; stages would
optimise at once, and split nothing. A step goes through all stages, so there are few.
"""


def built(mesh: Mesh | None) -> torch.nn.Module:
    module = build(CONFIG, mesh, dtype=torch.float64, seed=3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.5)
    return module.eval().requires_grad_(False)


@dataclass(frozen=True)
class Problem:
    """A model in one process and a box of inputs.

    ``least`` is an output that is reached in the box, ``most`` is CROWN's bound.
    """

    whole: ModelUnderVerification
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    least: float
    most: float

    def limit(self, share: float) -> float:
        """Return what lies at this share of the way from the least to the most."""
        return self.least + share * (self.most - self.least)

    def query(self, limit: float) -> Query:
        return query_above(self.lower, self.upper, limit)


def problem() -> Problem:
    whole = built(None)
    centre = torch.randn(70, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = centre + EPS * (2 * torch.rand(64, 70, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1)
    for step in range(60):
        (gradient,) = torch.autograd.grad(whole(x.requires_grad_())[:, 0].sum(), x)
        x = (x.detach() + EPS * 0.2 * (1 - step / 60) * gradient.sign()).clamp(centre - EPS, centre + EPS)
    network = prepare(whole, (70,))
    most = float(output_bounds(network, box_around(centre[None], EPS), "crown").upper[0, 0])
    subject = ModelUnderVerification(whole, NetworkEngine(network), whole, None, torch.float64)
    ends = tuple((centre - EPS).tolist()), tuple((centre + EPS).tolist())
    return Problem(subject, *ends, float(whole(x)[:, 0].max()), most)


def decisions(meshes: list[dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Decide by the stages of each mesh, and on the first one's last also in one process."""
    device, asked = distributed.start("cpu"), problem()
    found: dict[str, dict[str, Any]] = {}
    for degrees in meshes:
        mesh = build_mesh(ParallelSpec.model_validate(degrees), "cpu")
        line, own = StageLink(mesh, device), built(mesh)
        staged, model = prepare_stages(own, (70,), mesh.tp, line), InStages(own, line)
        engine, search_group = StagesEngine(staged), SearchGroup(mesh.dp)
        subjects = {
            "stages": ModelUnderVerification(model, engine, local_copy(model), None, torch.float64, search_group)
        }
        if line.is_last and degrees == meshes[0]:
            subjects["one process"] = asked.whole
        if mesh.tp.size == 1:  # tensor-parallel ranks have other numbers for the same entries
            margins = {place: domain_margins(each, asked.query(asked.most)) for place, each in subjects.items()}
            found[f"domains on {degrees}"] = margins
        for share, (place, subject) in ((share, each) for share in SHARES for each in subjects.items()):
            limit = asked.limit(SHARES[share])
            decision = decide(replace(subject, settings=PATIENT), asked.query(limit), CROWN, 60.0, restarts=0)
            case = found.setdefault(f"{share} on {degrees}", {})
            case[place] = [decision.verdict.value, decision.technique.value, decision.domains]
            if decision.counterexample is not None:
                x = torch.tensor(decision.counterexample, dtype=torch.float64)
                case[f"excess of {place}"] = float(asked.whole.module(x[None])[0, 0]) - limit
    distributed.stop()
    return found


def query_above(lower: tuple[float, ...], upper: tuple[float, ...], limit: float) -> Query:
    """Ask whether the first output reaches a limit."""
    return Query(len(lower), 2, (Disjunct(lower, upper, (Halfspace(((0, -1.0),), -limit),)),))


def domain_margins(subject: ModelUnderVerification, query: Query) -> list[float]:
    """Return margins of domains that are split at two values each, anywhere, optimised for some steps."""
    (specification,) = specifications(query, subject.device)
    root = bound_root(subject, specification, CROWN, 0.0)  # no time to optimise: both begin with the same bounds
    objective = dual_objective(subject.engine, root.box, root.bounds, root.specification_rows)
    domain_bounds = DomainBounds(objective, subject.memory)
    roots = domain_bounds.roots(root.margins)
    domain_bounds.calibrate(roots)
    generator, count = torch.Generator().manual_seed(5), 40
    domains = roots.repeat(count)
    for _ in range(2):
        number = torch.randint(0, 32, (count,), generator=generator)
        sign = torch.randint(0, 2, (count,), generator=generator).double() * 2 - 1
        domains = domains.split_further(number, sign, torch.zeros_like(sign), torch.zeros_like(sign))
    domains = domains.with_(margin=torch.full_like(domains.margin, -torch.inf))
    found: list[float] = domain_bounds.optimise(domains, OptimiserSettings(10, slope_step=0.1)).margin.tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("meshes", slow_but_for([[{"pp": 2}], MESHES], [{"pp": 2}]))
def test_stages_decide_what_one_process_decides(torchrun: Any, meshes: list[dict[str, int]]) -> None:
    results = torchrun(decisions, prod(meshes[0].values()), meshes=meshes)
    last = results[-1]
    bounded = [last.pop(f"domains on {degrees}") for degrees in meshes if "tp" not in degrees]
    assert len(last) == len(SHARES) * len(meshes)
    expected = bounded[0]["one process"]
    assert len(set(expected)) > 6, "splits make a difference"
    for margins in bounded:
        assert margins["stages"] == pytest.approx(expected, rel=1e-8)
    for name, case in last.items():
        verdict, means, domains = case["stages"]
        assert all(result[name]["stages"] == case["stages"] for result in results), name
        assert verdict == ("falsified" if "refuted" in name else "verified"), (name, case)
        assert means == "activation splitting"
        assert case.get("excess of stages", 0) >= 0
        if "splits" in name:
            assert domains > 5, "nothing was split"
        if "one process" in case:
            assert case["one process"] == [verdict, means, pytest.approx(domains, rel=0.5)]
