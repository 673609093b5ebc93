"""Tightens the bounds of the first layer in each domain, to where a counterexample may still be (Clip-and-Verify,
Zhou et al., 2025).

Values before any relaxation are affine in the inputs. A counterexample in a domain satisfies its splits of these
values, and the plane that proves the domain's bound is at most 0 there. Each end of such a value is least over the box
and these halfspaces: a linear program, whose dual is solved one multiplier at a time.

No counterexample is cut off: it is in the box and in every halfspace, so that a function plus multiples m ≥ 0 of what
is at most 0 is at most the function there. Any such multipliers are sound, and so is an end that is left alone: far
from a proof most gain nothing, which one product shows. What rounding may have added to a sum is taken off, as a share
of its terms.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf, nan

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

AT_ONCE = 2**22
"""Numbers of the rows that find functions at once."""


@dataclass(frozen=True, eq=False)
class Forms:
    """Affine functions of t in [−1, 1]: ``slopes`` ``(…, inputs)`` and ``constants`` ``(…)``.

    ``sizes`` ``(…)`` are sums of the sizes of all terms over the cube: in a constant, large ones may have cancelled.
    """

    slopes: Tensor
    constants: Tensor
    sizes: Tensor

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slopes, self.constants, self.sizes

    def at(self, index: Tensor) -> Forms:
        return Forms(*(each[index] for each in self.columns))

    def times(self, sign: Tensor) -> Forms:
        """Return multiples by 1, −1 or 0, ``(…)``."""
        return Forms(sign[..., None] * self.slopes, sign * self.constants, sign.abs() * self.sizes)


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
        parts = (_part(network, box, bounds, each) for each in _affine_layers(network))
        index, slopes, constants, sizes, kinks = map(torch.cat, zip(*parts, strict=True))
        return cls(index, Forms(slopes, constants, sizes), kinks)

    @classmethod
    def empty(cls, box: Interval) -> FirstLayer:
        nothing = box.lower.new_zeros(0)
        return cls(nothing.long(), Forms(nothing[:, None], nothing, nothing), nothing)


def first_layer(model: ModelUnderVerification, specification: Specification, root: RootBounds) -> FirstLayer:
    """Return the layer that domains clip: empty for balls, divided models, rigorous searches, and too many slopes."""
    network, varying = model.network, int((root.box.width > 0).sum())
    is_plain = model.engine.refines and model.engine.is_alone and specification.ball is None
    if not is_plain or not varying or not network.nonlinear:
        return FirstLayer.empty(root.box)
    entries = sum(int(unstable_entries(network, root.bounds, each).sum()) for each in _affine_layers(network))
    if entries * varying > model.settings.activations.clipping.most_slopes[root.box.lower.device.type]:
        return FirstLayer.empty(root.box)
    return FirstLayer.of(network, root.box, root.bounds)


def _affine_layers(network: Network) -> list[Preactivation]:
    """Return the preactivations that are affine in the inputs."""
    behind = {each.value for each in after_relaxations(network)}
    return [each for each in Preactivations.of(network).each if each.value not in behind]


def _part(network: Network, box: Interval, bounds: Interval, layer: Preactivation) -> tuple[Tensor, ...]:
    """Return the index, slopes, constants, sizes and kinks of one layer's unstable entries."""
    place = unstable_entries(network, bounds, layer).nonzero().squeeze(1)
    parts = [_forms_of(network, box, layer, part).columns for part in torch.split(place, max(1, AT_ONCE // layer.size))]
    slopes, constants, sizes = (torch.cat(column) for column in zip(*parts, strict=True))
    kink = breakpoint_of(network, layer)
    kinks = torch.full_like(constants, nan if kink is None else kink)
    return layer.offset + place, slopes, constants, sizes, kinks


def _forms_of(network: Network, box: Interval, layer: Preactivation, place: Tensor) -> Forms:
    """Return some entries of a layer as functions of the inputs."""
    rows = box.lower.new_zeros(1, len(place), layer.size)
    rows[0, torch.arange(len(place)), place] = 1
    recorder = CoefficientRecorder(box.lower, box.upper, box, [])
    backward = Pass(network, {network.graph.input.name: recorder}, {})
    least = backward.lower_bounds(layer.value, rows.reshape(1, -1, *layer.shape))[0]
    arrived = torch.cat(recorder.arrived, dim=1)
    return _over_cube(arrived[0], box, least - box.least(arrived)[0])


def _over_cube(coefficients: Tensor, box: Interval, bias: Tensor) -> Forms:
    """Return ``coefficients·x + bias`` ``(n, *input shape)`` as functions of t, for the inputs that vary."""
    flat, varying = by_row(coefficients[None])[0], (box.width > 0).flatten()
    slopes, centre = (flat * box.radius.flatten())[:, varying], box.centre.flatten()
    sizes = bias.abs() + flat.abs() @ centre.abs() + slopes.abs().sum(dim=1)
    return Forms(slopes, bias + flat @ centre, sizes)


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
    def _most(self) -> int:
        return self.settings.entries[self.layer.index.device.type]

    @property
    def is_whole(self) -> bool:
        """Return whether no relaxation has bounds that all domains share."""
        return self.applies and not after_relaxations(self.domain_bounds.network)

    @torch.no_grad()
    def clip(self, domains: Domains, until: float) -> Domains:
        """Return the domains with bounds that hold wherever in them a counterexample may be; ends that cross mean
        nowhere. Ends that are not reached ``until`` then (``time.monotonic``) stay as they are.
        """
        if not self.applies or not len(domains):
            return domains
        numbers = (1 + domains.depth) * sum(self.layer.forms.slopes.shape)
        at_once = max(1, min(self.domain_bounds.capacity, self._most // numbers))
        parts = self.domain_bounds.in_parts(len(domains), at_once, lambda part: self._clip(domains.rows(part), until))
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

    def _clip(self, domains: Domains, until: float) -> Domains:
        known = self.domain_bounds.objective.within(domains).arranged(lambda end: end[:, self.layer.index])
        kinks, halfspaces = self.layer.kinks, self._halfspaces(domains)
        is_open = (known.lower < known.upper) & ~((known.lower >= kinks) | (known.upper <= kinks))
        for sign, end, gains in zip((1, -1), (known.lower, known.upper), self._gains(halfspaces), strict=True):
            domain, entry = (is_open & gains).nonzero(as_tuple=True)
            least = self._least(sign, domain, entry, halfspaces, until)
            end[domain, entry] = sign * torch.maximum(sign * end[domain, entry], least)
        return domains.with_(lower=known.lower, upper=known.upper)

    def _gains(self, halfspaces: Forms) -> tuple[Tensor, Tensor]:
        """Return whether a first multiplier of any halfspace raises the least value of an entry over the cube, and of
        its negative, ``(n, entries)``: if none does, 0 is best for all.
        """
        falls = halfspaces.slopes @ self.layer.forms.slopes.sign().T
        rises = halfspaces.constants[..., None]
        return (rises > falls).any(dim=1), (rises > -falls).any(dim=1)

    def _least(self, sign: int, domain: Tensor, entry: Tensor, halfspaces: Forms, until: float) -> Tensor:
        """Return the least value of each entry ``(n,)``, times ``sign``, in the halfspaces of the domain beside it; −∞
        for those that are not reached ``until`` then.
        """

        def least(part: slice) -> Tensor:
            if time.monotonic() > until:
                return halfspaces.constants.new_full((len(entry[part]),), -inf)
            rows = self.layer.forms.at(entry[part, None])
            return least_within(rows.times(torch.full_like(rows.constants, sign)), halfspaces.at(domain[part]))[:, 0]

        at_once = max(1, self._most // halfspaces.slopes[0].numel())
        parts = self.domain_bounds.in_parts(len(domain), at_once, least)
        return torch.cat(parts) if parts else halfspaces.constants.new_zeros(0)

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
        own = domains.with_(index=place, sign=torch.where(place >= 0, domains.sign, 0)).pack()
        split = self.layer.forms.at(own.index)
        split = Forms(split.slopes, split.constants - own.at, split.sizes + own.at.abs()).times(-own.sign)
        columns = (torch.cat([one[:, None], more], 1) for one, more in zip(plane.columns, split.columns, strict=True))
        slopes, constants, sizes = columns
        return Forms(slopes, constants - RELATIVE_MARGIN[slopes.dtype] * sizes, sizes)


def least_within(rows: Forms, halfspaces: Forms) -> Tensor:
    """Return lower bounds ``(n, rows)`` of functions over the cube, where all ``halfspaces`` ``(n, k, inputs)`` are at
    most 0. The multiplier of each is chosen once.
    """
    count, left = halfspaces.slopes.shape[1], rows.slopes
    multipliers = left.new_zeros(*left.shape[:2], count)
    for number in range(count):
        slopes = halfspaces.slopes[:, number, None]
        multipliers[:, :, number] = _best_multiplier(left, slopes, halfspaces.constants[:, number, None])
        left = left + multipliers[:, :, number, None] * slopes
    left = rows.slopes + multipliers @ halfspaces.slopes
    shift = multipliers @ halfspaces.constants[..., None]
    size = rows.sizes + (multipliers @ halfspaces.sizes[..., None]).squeeze(2)
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
