"""Tightens the bounds of the first layer in each domain, to where a counterexample may still be (Clip-and-Verify,
Zhou et al., 2025).

Values before any relaxation are affine in the inputs. A counterexample in a domain satisfies its splits of these
values, and the plane that proves the domain's bound is at most 0 there. Each end of such a value is least over the box
and these halfspaces: a linear program, whose dual is solved one multiplier at a time. Any multipliers are sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.network import Network
from service.bounds.split import Preactivation, Preactivations, breakpoint_of
from service.verification.bab.activations.domain_bounds import CoefficientRecorder, DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.intermediate_bab import after_relaxations
from service.verification.bab.activations.intermediate_bounds import RootBounds, unstable_entries
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import ClippingSettings
from service.verification.bab.specification import Specification
from service.verification.verdict import RELATIVE_MARGIN


@dataclass(frozen=True, eq=False)
class Forms:
    """Affine functions of t in [−1, 1]: ``slopes`` ``(…, inputs)`` and ``constants`` ``(…)``."""

    slopes: Tensor
    constants: Tensor

    def __neg__(self) -> Forms:
        return Forms(-self.slopes, -self.constants)

    def at(self, index: Tensor) -> Forms:
        return Forms(self.slopes[index], self.constants[index])

    @property
    def size(self) -> Tensor:
        """Return the largest size of each."""
        return self.slopes.abs().sum(dim=-1) + self.constants.abs()


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """The entries ``index`` ``(k,)`` of all preactivations that are affine in the inputs and unstable at the root.

    ``forms`` are their values, ``kinks`` ``(k,)`` the points beyond which a value needs no relaxation, NaN if there is
    none.
    """

    index: Tensor
    forms: Forms
    kinks: Tensor

    @classmethod
    def of(cls, network: Network, box: Interval, bounds: Interval) -> FirstLayer:
        """Return the layer of a network that is all here, over one ``box``, with root ``bounds`` ``(1, entries)``."""
        behind = {each.value for each in after_relaxations(network)}
        layers = [each for each in Preactivations.of(network).each if each.value not in behind]
        index, slopes, constants, kinks = zip(*(_part(network, box, bounds, each) for each in layers), strict=True)
        return cls(torch.cat(index), Forms(torch.cat(slopes), torch.cat(constants)), torch.cat(kinks))

    @classmethod
    def empty(cls, box: Interval) -> FirstLayer:
        nothing = box.lower.new_zeros(0)
        return cls(nothing.long(), Forms(nothing[:, None], nothing), nothing)


def first_layer(model: ModelUnderVerification, specification: Specification, root: RootBounds) -> FirstLayer:
    """Return the layer that domains clip: empty for balls, divided models, rigorous searches, and too many inputs."""
    network, varying = model.network, int((root.box.width > 0).sum())
    is_plain = model.engine.refines and model.engine.is_alone and specification.ball is None
    if not is_plain or not 0 < varying <= model.settings.activations.clipping.most_inputs or not network.nonlinear:
        return FirstLayer.empty(root.box)
    return FirstLayer.of(network, root.box, root.bounds)


def _part(network: Network, box: Interval, bounds: Interval, layer: Preactivation) -> tuple[Tensor, ...]:
    """Return the index, slopes, constants and kinks of one layer's unstable entries."""
    place = unstable_entries(network, bounds, layer).nonzero().squeeze(1)
    rows = box.lower.new_zeros(1, len(place), layer.size)
    rows[0, torch.arange(len(place)), place] = 1
    recorder = CoefficientRecorder(box.lower, box.upper, box, [])
    backward = Pass(network, {network.graph.input.name: recorder}, {})
    least = backward.lower_bounds(layer.value, rows.reshape(1, -1, *layer.shape))[0]
    arrived = torch.cat(recorder.arrived, dim=1)
    forms = _over_cube(arrived[0], box, least - box.least(arrived)[0])
    kink = breakpoint_of(network, layer)
    kinks = torch.full_like(least, nan if kink is None else kink)
    return layer.offset + place, forms.slopes, forms.constants, kinks


def _over_cube(coefficients: Tensor, box: Interval, bias: Tensor) -> Forms:
    """Return ``coefficients·x + bias`` ``(n, *input shape)`` as functions of t, for the inputs that vary."""
    flat, varying = by_row(coefficients[None])[0], (box.width > 0).flatten()
    slopes = (flat * box.radius.flatten())[:, varying]
    return Forms(slopes, bias + flat @ box.centre.flatten())


@dataclass(frozen=True, eq=False)
class Clipping:
    """Tightens the domains of ``domain_bounds``, whose columns ``lower`` and ``upper`` are of the ``layer``."""

    domain_bounds: DomainBounds
    layer: FirstLayer
    settings: ClippingSettings

    @property
    def applies(self) -> bool:
        return len(self.layer.index) > 0

    @property
    def is_whole(self) -> bool:
        """Return whether no relaxation has bounds that all domains share."""
        return self.applies and not after_relaxations(self.domain_bounds.network)

    @torch.no_grad()
    def clip(self, domains: Domains) -> Domains:
        """Return the domains with bounds that hold wherever in them a counterexample may be; ends that cross mean
        nowhere.
        """
        if not self.applies or not len(domains):
            return domains
        numbers = 2 * self.layer.forms.slopes.numel() + 1
        at_once = max(1, min(self.domain_bounds.capacity, self.settings.entries // numbers))
        parts = self.domain_bounds.in_parts(len(domains), at_once, lambda part: self._clip(domains.rows(part)))
        return Domains.join(parts)

    def split_where_closed(self, domains: Domains) -> Domains:
        """Return one domain with splits, too, of the entries that need no relaxation within its clipped bounds."""
        objective, index, kinks = self.domain_bounds.objective, self.layer.index, self.layer.kinks
        known, root = (
            each.arranged(lambda end: end[0, index]) for each in (objective.within(domains), objective.bounds)
        )
        above, below = known.lower >= kinks, known.upper <= kinks
        for place in ((above | below) & (root.lower < kinks) & (root.upper > kinks)).nonzero():
            sign = torch.where(above[place], 1, -1).to(domains.sign)
            domains = domains.split_further(index[place], sign, kinks[place], torch.zeros_like(sign))
        return domains

    def _clip(self, domains: Domains) -> Domains:
        known = self.domain_bounds.objective.within(domains).arranged(lambda end: end[:, self.layer.index])
        kinks = self.layer.kinks
        is_open = (known.lower < known.upper) & ~((known.lower >= kinks) | (known.upper <= kinks))
        most = int(is_open.sum(dim=1).max())
        if not most:
            return domains
        # All domains have equally many rows: some have closed entries among them, which does no harm.
        place = is_open.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        forms = self.layer.forms.at(place)
        least = self._least(forms, -forms, self._halfspaces(domains))
        lower = known.lower.scatter_reduce(1, place, least[:, :most], "amax")
        upper = known.upper.scatter_reduce(1, place, -least[:, most:], "amin")
        return domains.with_(lower=lower, upper=upper)

    def _least(self, ends: Forms, others: Forms, halfspaces: Forms) -> Tensor:
        rows = Forms(torch.cat([ends.slopes, others.slopes], 1), torch.cat([ends.constants, others.constants], 1))
        return least_within(rows, halfspaces, self.settings.sweeps)

    def _halfspaces(self, domains: Domains) -> Forms:
        """Return functions that are at most 0 at a domain's counterexamples: the plane of its bound, and its splits,
        ``(n, 1 + depth, inputs)``.
        """
        bounds = self.domain_bounds
        coefficients, bias = bounds.planes(domains)
        plane = _over_cube(coefficients, bounds.box, bias)
        places = torch.full((bounds.preactivations.entries,), -1, device=self.layer.index.device)
        places[self.layer.index] = torch.arange(len(self.layer.index), device=places.device)
        place = places[domains.index]
        # sign·(z − at) ≥ 0, and nothing for a split of another layer
        sign = torch.where(place >= 0, domains.sign, 0)
        split = self.layer.forms.at(place)
        slopes = torch.cat([plane.slopes[:, None], -sign[..., None] * split.slopes], dim=1)
        constants = torch.cat([plane.constants[:, None], -sign * (split.constants - domains.at)], dim=1)
        found = Forms(slopes, constants)
        return Forms(slopes, constants - RELATIVE_MARGIN[slopes.dtype] * found.size)


def least_within(rows: Forms, halfspaces: Forms, sweeps: int) -> Tensor:
    """Return lower bounds ``(n, rows)`` of functions over the cube, where all ``halfspaces`` ``(n, k, inputs)`` are at
    most 0.
    """
    count = halfspaces.slopes.shape[1]
    multipliers = rows.slopes.new_zeros(*rows.slopes.shape[:2], count)
    left = rows.slopes
    for number in [*range(count)] * sweeps:
        slopes = halfspaces.slopes[:, number, None]
        left = left - multipliers[:, :, number, None] * slopes
        multipliers[:, :, number] = _best_multiplier(left, slopes, halfspaces.constants[:, number, None])
        left = left + multipliers[:, :, number, None] * slopes
    left = rows.slopes + multipliers @ halfspaces.slopes
    shift = multipliers @ halfspaces.constants[..., None]
    size = rows.size + (multipliers @ halfspaces.size[..., None]).squeeze(2)
    least = rows.constants + shift.squeeze(2) - left.abs().sum(dim=2) - RELATIVE_MARGIN[left.dtype] * size
    return least.nan_to_num(nan=-torch.inf, posinf=-torch.inf)


def _best_multiplier(left: Tensor, slopes: Tensor, constants: Tensor) -> Tensor:
    """Return the m ≥ 0 ``(n, rows)`` with the greatest ``m·constant − Σ |left + m·slope|``, which is concave."""
    # It falls less steeply up to each input's kink, and more steeply beyond.
    kinks = -left / slopes
    kinks = torch.where(kinks > 0, kinks, torch.inf).nan_to_num(nan=torch.inf, posinf=torch.inf)
    sizes = slopes.abs().expand_as(left)
    before = constants + torch.where(kinks < torch.inf, sizes, -sizes).sum(dim=2)
    kinks, order = kinks.sort(dim=2)
    after = before[..., None] - 2 * sizes.gather(2, order).cumsum(dim=2)
    turn = (after > 0).sum(dim=2, keepdim=True).clamp(max=kinks.shape[2] - 1)
    best = torch.where(before > 0, kinks.gather(2, turn).squeeze(2), 0)
    return torch.where(best < torch.inf, best, 0)
