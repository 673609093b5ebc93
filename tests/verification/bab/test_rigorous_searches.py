"""Searches whose verdicts hold in real arithmetic, against rational numbers."""

from __future__ import annotations

import copy
import importlib
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import first_fast, slow_but_for
from nets import mlp
from onnx_jobs import BOX, DECLARED, reach
from onnx_jobs import specification as of_onnx
from rigorous_problems import above, both_sides, cancelling, check_exactly, corners, exactly, linear, subject, vanishing
from torch import nn
from verify_jobs import context
from verify_jobs import specification as of_digits

from service.bounds.affine_forward import AffineForm, _linear
from service.bounds.interval import Interval
from service.bounds.methods import CROWN, METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.optimise import Ascent
from service.bounds.rigorous import RigorousAnalysis, rigorous_crown
from service.bounds.split import Preactivations
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.jobs.files import DataLayout
from service.verification import job
from service.verification.bab.activations.certificates import Certificates
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DisjunctRows, DualObjective, _empty
from service.verification.bab.decision import Decision, Technique
from service.verification.bab.driver import decide
from service.verification.bab.settings import OptimiserSettings
from service.verification.verdict import Verdict

DOUBLE = torch.float64
DECIDING = importlib.import_module("service.verification.bab.driver")


@pytest.fixture(params=[Technique.INPUTS, Technique.ACTIVATIONS])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Technique:
    if request.param is Technique.ACTIVATIONS:
        monkeypatch.setattr(DECIDING, "technique_for", lambda *_: Technique.ACTIVATIONS)
    found: Technique = request.param
    return found


@pytest.mark.parametrize(("dtype", "bits"), slow_but_for([(torch.float32, 12), (DOUBLE, 27)], (torch.float32, 12)))
def test_a_plain_search_verifies_what_a_point_violates_and_a_rigorous_one_does_not(
    means: Technique, dtype: torch.dtype, bits: int
) -> None:
    """``y ≥ 1/2`` at x = 1 over the rational numbers, but rounded bounds are those of ``y = 0``."""
    net = vanishing(bits)
    assert exactly(net, [1.0]) == [Fraction(1)]
    query = Query(1, 1, (Disjunct((0.5,), (1.0,), (Halfspace(((0, -1.0),), -0.5),)),))

    def decided(dtype: torch.dtype, *, rigorous: bool) -> Decision:
        return decide(subject(net, 1, dtype, rigorous=rigorous), query, CROWN, 1.0, restarts=0)

    plain = decided(dtype, rigorous=False)
    assert (plain.verdict, plain.technique) == (Verdict.VERIFIED, means)
    assert decided(DOUBLE, rigorous=True).verdict is not Verdict.VERIFIED


@pytest.mark.parametrize(("above", "verdict"), [(0.0, Verdict.FALSIFIED), (-1e-9, Verdict.VERIFIED)])
def test_a_rigorous_search_falsifies_what_is_reached_exactly_and_no_more(above: float, verdict: Verdict) -> None:
    """Two outputs that are equal over the reals: no interval around rounded values can tell that they are."""
    net = nn.Sequential(linear([[0.75, 0.25], [0.75, 0.25]]), nn.ReLU(), linear([[1.0, 0.0], [0.5, 0.5]]))
    box = Disjunct((0.1, 0.1), (0.7, 0.7), (Halfspace(((0, 1.0), (1, -1.0)), above),))
    found = decide(subject(net, 2, DOUBLE, rigorous=True), Query(2, 2, (box,)), CROWN, 20.0)
    assert found.verdict is verdict


@pytest.mark.parametrize(("splits", "share"), [(Technique.INPUTS, 0.1), (Technique.ACTIVATIONS, -0.03)])
def test_what_is_verified_holds_over_the_rational_numbers(splits: Technique, share: float) -> None:
    holds_over_the_rational_numbers(splits, 1, share)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.floats(-0.05, 0.15))
@pytest.mark.parametrize("splits", [Technique.INPUTS, Technique.ACTIVATIONS])
def test_what_is_verified_of_any_network_holds_over_the_rational_numbers(
    splits: Technique, seed: int, share: float
) -> None:
    holds_over_the_rational_numbers(splits, seed, share)


def holds_over_the_rational_numbers(splits: Technique, seed: int, share: float) -> None:
    """And is decided where a plain search decides it: thresholds near the greatest value that was found."""
    net, _, network = cancelling(seed % 4)
    x = 2 * torch.rand(4000, 4, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) - 1
    values = net(x)
    least, most = values.amin(dim=0), values.amax(dim=0)
    query = above(4, 1.0, *(most + share * (most - least)).tolist())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DECIDING, "technique_for", lambda *_: splits)
        plain, rigorous = (decide(subject(net, 4, DOUBLE, rigorous=each), query, CROWN, 20.0) for each in (False, True))
    assert rigorous.verdict == plain.verdict != Verdict.UNKNOWN
    if rigorous.verdict is Verdict.VERIFIED:
        for point in x[values.argmax(dim=0)].tolist():
            for value, case in zip(exactly(net, point), query.disjuncts, strict=True):
                assert value < -Fraction(case.halfspaces[0].threshold)
    assert network.graph.output.size == 2


def split_up(generator: torch.Generator, count: int, depth: int, domain_bounds: DomainBounds) -> Domains:
    """Domains with random splits, slopes, multipliers and weights: any are sound."""
    roots = domain_bounds.roots(torch.full_like(domain_bounds.specification_rows.offsets, -torch.inf)).repeat(count)
    shape = len(roots), depth
    index = torch.randint(domain_bounds.preactivations.entries, shape, generator=generator)
    return roots.with_(
        index=index,
        sign=torch.randint(-1, 2, shape, generator=generator).double(),
        at=torch.randn(shape, generator=generator, dtype=DOUBLE) * (torch.rand(shape, generator=generator) < 0.5),
        beta=torch.randn(shape, generator=generator, dtype=DOUBLE) * 3,
        weights=torch.rand(roots.weights.shape, generator=generator, dtype=DOUBLE),
        slopes=torch.rand(roots.slopes.shape, generator=generator, dtype=DOUBLE),
    )


@pytest.mark.parametrize("activation", first_fast(2, [nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2)]))
def test_a_certificate_is_what_the_parameters_prove(activation: nn.Module) -> None:
    """But for rounding, of random domains, and never more than the values of those inputs that satisfy the splits."""
    generator = torch.Generator().manual_seed(3)
    net = mlp([3, 8, 8, 2], activation, 1).double().requires_grad_(False)
    network = prepare(net, (3,))
    box = Interval(-torch.ones(1, 3, dtype=DOUBLE), torch.ones(1, 3, dtype=DOUBLE))
    root = rigorous_crown(network, box, BoundOptions())
    rows = torch.tensor([[[1.0, -1.0], [0.3, 0.1]]], dtype=DOUBLE)
    offsets = torch.tensor([[0.1, -0.2]], dtype=DOUBLE)
    specification_rows = DisjunctRows(network.graph.output.name, rows, offsets, torch.ones(1, 2, dtype=torch.bool))
    domain_bounds = DomainBounds(
        DualObjective(network, box, Preactivations.of(network).bounds(root.inputs), specification_rows)
    )
    domains = split_up(generator, 40, 3, domain_bounds)
    certified = Certificates(domain_bounds, root).certify(domains).margin
    plain = domain_bounds.margins(domains)
    finite = plain.isfinite()
    assert finite.sum() > 20
    # Never less: lines are moved no farther out than they have to, and splits of one entry count together.
    assert (certified >= plain - 1e-7)[finite].all()
    x = 2 * torch.rand(20000, 3, generator=generator, dtype=DOUBLE) - 1
    hidden = torch.cat([net[:1](x), net[:3](x)], dim=1)
    weights = domains.weights / domains.weights.sum(dim=1, keepdim=True)
    values = torch.einsum("nr,ri,xi->nx", weights, rows[0], net(x)) - (weights * offsets).sum(dim=1, keepdim=True)
    inside = (domains.sign[:, None] * (hidden[:, domains.index].transpose(0, 1) - domains.at[:, None]) >= 0).all(dim=2)
    lowest = torch.where(inside, values, torch.inf).amin(dim=1)
    assert (certified <= lowest).all()
    assert inside.any(dim=1).sum() > 20


def test_an_optimised_domain_is_certified_to_rounding_and_an_empty_one_is_done() -> None:
    net, _, network = cancelling(1)
    box = Interval(-torch.ones(1, 4, dtype=DOUBLE), torch.ones(1, 4, dtype=DOUBLE))
    root = rigorous_crown(network, box, BoundOptions())
    rows = torch.tensor([[[1.0, 0.0]]], dtype=DOUBLE)
    nothing = torch.zeros(1, 1, dtype=DOUBLE)
    specification_rows = DisjunctRows(network.graph.output.name, rows, nothing, nothing == 0)
    domain_bounds = DomainBounds(
        DualObjective(network, box, Preactivations.of(network).bounds(root.inputs), specification_rows)
    )
    certificates = Certificates(domain_bounds, root)
    halves = split_up(torch.Generator().manual_seed(0), 6, 2, domain_bounds)
    found = domain_bounds.optimise(halves, OptimiserSettings(10, 0.1))
    certified = certificates.certify(found).margin
    torch.testing.assert_close(certified, domain_bounds.margins(found), rtol=1e-9, atol=1e-9)
    far = halves.with_(sign=torch.ones_like(halves.sign), at=torch.full_like(halves.at, 1e9))
    assert (certificates.certify(far).margin == torch.inf).all()
    assert net is not network


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_rigorous_form(method: str) -> None:
    """No rational value leaves its bounds, and they are the plain ones but for rounding."""
    net, _, network = cancelling(2)
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    box, options = Interval(x - 2, x + 2), BoundOptions(ascent=Ascent(iterations=5))
    analysis = METHODS[method].rigorous(network, box, options)
    assert isinstance(analysis, RigorousAnalysis)
    found = analysis.lower_bounds(both_sides(2))
    plain = METHODS[method](network, box, options).lower_bounds(both_sides(2)).detach()
    torch.testing.assert_close(
        found, plain, rtol=0, atol=(0.05 if "alpha" in method else 1e-9) * float(plain.abs().max())
    )
    check_exactly(net, corners(box, 20), found)


@given(middle=st.floats(-1e3, 1e3), distance=st.floats(0, 10))
def test_an_interval_about_a_point_holds_its_real_ends(middle: float, distance: float) -> None:
    found = Interval.about(torch.tensor([[middle]], dtype=DOUBLE), distance)
    low, high = (Fraction(end.item()) for end in (found.lower, found.upper))
    assert low <= Fraction(middle) - Fraction(distance)
    assert high >= Fraction(middle) + Fraction(distance)
    inner = Interval(*(torch.nextafter(end, torch.tensor(middle, dtype=DOUBLE)) for end in (found.lower, found.upper)))
    if distance > 1e-9:
        assert Fraction(inner.lower.item()) > Fraction(middle) - Fraction(distance)
        assert Fraction(inner.upper.item()) < Fraction(middle) + Fraction(distance)


def test_forms_keep_what_a_large_constant_takes_from_small_slopes() -> None:
    """In float32 a thousand and a thousandth share 24 bits; the slope's own rounding is part of the remainder."""
    layer = linear([[1e-3, 0.0], [0.0, 1.3e-3]])
    layer.bias.data = torch.tensor([1e3, 3e3], dtype=DOUBLE)
    network = prepare(nn.Sequential(copy.deepcopy(layer), nn.Tanh()).float(), (2,))
    node = network.nodes[network.nonlinear[0].inputs[0]]
    centre, slopes = torch.zeros(1, 2), torch.eye(2)[None]
    form = _linear(network, node, [AffineForm(centre, slopes, torch.zeros(1, 2))])
    exact = layer.weight.T.float().double()
    off = (form.slopes[0].double() - exact).abs().sum(dim=0)
    assert (off > 1e-6).any()
    assert (form.rest[0].double() >= off).all()


def test_an_entry_near_zero_is_not_taken_for_empty() -> None:
    """Beside values of a thousand an end is off by more than its own size suggests."""
    near, far = 1e-4, 1e3
    clipped = Interval(torch.tensor([[near, -far]]), torch.tensor([[0.0, far]]))
    reach = torch.full((2,), far)
    assert not _empty(clipped, reach).any()
    assert _empty(Interval(clipped.lower + 1, clipped.upper), reach).all()


@pytest.mark.slow
def test_a_rigorous_job_searches_queries_and_samples(trained: DataLayout) -> None:
    least, most = reach()
    query = f"{DECLARED}{BOX}(assert (>= Y_0 {most + 0.1 * (most - least)}))"
    ranked, report = context(trained)
    result = job.run(of_onnx(trained, query, rigorous=True), ranked)
    assert result is not None
    assert result["method"] == "crown (rigorous)"
    assert [(row["verdict"], row["decided_by"]) for row in report.bounds] == [("verified", "input splitting")]
    digits = {"data": {"source": "digits"}, "count": 2, "eps": 0.05}
    fields = {"property": {"robustness": digits}, "method": "beta-crown", "budget": {"seconds": 20}}
    plain, rigorous = context(trained), context(trained)
    job.run(of_digits(**fields), plain[0])
    job.run(of_digits(**fields, rigorous=True), rigorous[0])
    assert [row["verdict"] for row in rigorous[1].bounds] == [row["verdict"] for row in plain[1].bounds]


def rigorous_job(folder: str, query: str, degrees: list[str]) -> dict[str, Any]:
    from service.parallel import distributed

    data = DataLayout(Path(folder))
    ranked, report = context(data, int(os.environ["RANK"]), 2)
    if ranked.rank == 0:
        of_onnx(data, query)  # uploads the files
    distributed.start("cpu")
    torch.distributed.barrier()
    box = {"lower": [-1.0] * 3, "upper": [1.0] * 3, "output": [{"coefficients": [1, 0], "threshold": -1e6}]}
    built = {"family": "mlp", "in_features": 3, "hidden": [8, 8], "out_features": 2}
    rows: dict[str, list[Any]] = {}
    for number, degree in enumerate(degrees):
        fields = {"rigorous": True, "parallel": {degree: 2}}
        forms = [{}, {"property": {"box": box}}, {"property": {"box": box}, "model": built, "method": "alpha-crown"}]
        for index, form in enumerate(forms):
            ranked, report = context(data, ranked.rank, 2, job_id=f"job_{number}{index}" + "b" * 20)
            job.run(of_onnx(data, query, **fields, **form), ranked)
            rows.setdefault(degree, []).extend(report.bounds)
    distributed.stop()
    return rows


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [["pp"], ["dp_shard", "tp"]])
def test_rigorous_jobs_run_on_every_mesh(tmp_path: Path, torchrun: Any, degrees: list[str]) -> None:
    """A query that is searched, a box, and a box of a built-in model; the rows are those of whoever leads."""
    least, most = reach()
    query = f"{DECLARED}{BOX}(assert (>= Y_0 {most + 0.1 * (most - least)}))"
    first, second = torchrun(rigorous_job, 2, folder=str(tmp_path), query=query, degrees=degrees)
    for degree in degrees:
        rows = first[degree] + second[degree]
        assert [row["verdict"] for row in rows] == ["verified"] * 3, degree
        assert [row["method"] for row in rows] == ["crown (rigorous)"] * 2 + ["alpha-crown (rigorous)"], degree
