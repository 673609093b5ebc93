"""Trains certifiably: the loss is that of the worst case within a box, by differentiable bounds.

IBP: Gowal et al., 2018. CROWN-IBP: Zhang et al., 2020. The last linear layers are merged with the difference of two
logits, which bounds the margin more tightly than the logits do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.capture import local_state
from service.bounds.interval import Interval
from service.bounds.methods import BoundOptions
from service.bounds.methods.passes import crown_ibp, ibp, propagate
from service.bounds.network import Network, Stage, prepare_stage
from service.jobs.plugins import Features
from service.jobs.spec.objective import Certified
from service.models.registry import build
from service.objectives.base import Objective, ObjectiveContext
from service.parallel.batch_norm import normalisations
from service.parallel.pipeline.stage import Part


@dataclass(frozen=True)
class Level:
    """Holds the difficulty of one step: the box's radius, and the weights of the clean loss and of CROWN's bound."""

    eps: float
    clean: float
    crown: float


def level(config: Certified, step: int) -> Level:
    """Return the level of ``step`` (from 0): easy while it warms up, then linearly harder until the ramp's end."""
    if step < config.warmup:
        progress = 0.0
    else:
        progress = min((step - config.warmup + 1) / config.ramp, 1.0) if config.ramp else 1.0
    crown = 1 - (1 - config.beta) * progress if config.bound == "crown-ibp" else 0.0
    return Level(config.eps * progress, 1 - (1 - config.kappa) * progress, crown)


def final_level(config: Certified) -> Level:
    """Return the level of evaluation: the whole radius, by intervals."""
    return Level(config.eps, config.kappa, 0.0)


class _CertifiedObjective(Objective):
    """The cross entropy of the clean logits and that of the worst-case ones.

    Stages exchange ``(batch, 3, …)``: a point, and the lower and upper ends of its box. The outputs are
    ``(batch, 1 + classes, classes)``: the logits, then in row 1 + i lower bounds of logit i minus every logit.
    """

    measures = 3

    def __init__(self, config: Certified, context: ObjectiveContext, samples: Features) -> None:
        self.config, self.context, self.classes = config, context, samples.classes
        self.limits = config.limits(samples.limits)
        self.now = level(config, 0)
        self._entering: list[tuple[int, ...]] = []

    def begin(self, step: int) -> None:
        self.now = level(self.config, step)

    def adapt(self, stage: nn.Module, part: Part) -> None:
        if named := normalisations(stage):
            raise ValueError(
                f"objective certified: {named[0][0]!r} normalises by the other samples of a batch, which no box holds; "
                "expected a model without batch normalisation"
            )
        shape = self._input_shape(part)
        prepared = prepare_stage(stage, shape, self.context.mesh.tp)
        stage.forward = _BoundedForward(self, stage, prepared, part)

    def _input_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of one instance as it reaches this rank's stage; earlier stages are traced on ``meta``."""
        if not self._entering:
            assert isinstance(self.context.config.reads, Features)
            self._entering.append((self.context.config.reads.features,))
        while len(self._entering) <= part.stage:
            x = torch.empty(2, *self._entering[-1], device="meta")
            before = Part(len(self._entering) - 1, part.stages)
            leaving = build(self.context.config, self.context.mesh, device="meta", part=before)(x)
            self._entering.append(tuple(leaving.shape[1:]))
        return self._entering[part.stage]

    def units(self, stage: nn.Module) -> Iterable[nn.Module]:
        """Return no units: bounds go through a stage as one graph, so its parameters are gathered together."""
        return ()

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        clean = functional.cross_entropy(wide[:, 0], targets)
        worst = functional.cross_entropy(-_margins(wide, targets), targets)
        return self.now.clean * clean + (1 - self.now.clean) * worst

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return clean loss, correct predictions, and samples whose prediction is certified."""
        if not len(targets):
            return torch.zeros(self.measures, dtype=torch.float64, device=targets.device)
        logits = outputs[:, 0]
        loss = functional.cross_entropy(logits.float(), targets, reduction="sum").double()
        others = functional.one_hot(targets, self.classes) == 0
        certified = ((_margins(outputs, targets) > 0) | ~others).all(dim=1)
        return torch.stack((loss, (logits.argmax(-1) == targets).sum().double(), certified.sum().double()))

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        loss, correct, certified = (totals / samples).tolist()
        return {"eval_loss": loss, "eval_accuracy": correct, "eval_certified_accuracy": certified}


@dataclass(frozen=True, eq=False)
class _BoundedForward:
    """A stage's forward on boxes; parameters are whole on their ``tp`` rank when it is called."""

    objective: _CertifiedObjective
    module: nn.Module
    prepared: Stage
    part: Part

    def __call__(self, x: Tensor) -> Tensor:
        now = self.objective.now if self.module.training else final_level(self.objective.config)
        point, box = self._box(x, now.eps) if self.part.is_first else (x[:, 0], Interval(x[:, 1], x[:, 2]))
        # The class's own forward: the instance's is this object.
        value: Tensor = type(self.module).forward(self.module, point)
        network = self.prepared.network(local_state(self.module))
        if self.part.is_last:
            return torch.cat([value.unsqueeze(1), self._margins(network, box, now.crown)], dim=1)
        bounds = propagate(network, box)[network.graph.output.name]
        return torch.stack([value, bounds.lower, bounds.upper], dim=1)

    def _box(self, x: Tensor, eps: float) -> tuple[Tensor, Interval]:
        """Return the ball around ``x`` within the limits of inputs; a sample beyond the source's limits stays in its
        own box.

        Raises ``ValueError`` for a sample beyond limits that the spec gives: its box would be no ball.
        """
        _check_within(x, self.objective.config)
        low, high = self.objective.limits
        lower, upper = (x - eps).clamp(min=low), (x + eps).clamp(max=high)
        return x, Interval(torch.minimum(lower, x), torch.maximum(upper, x))

    def _margins(self, network: Network, box: Interval, crown: float) -> Tensor:
        """Return lower bounds of differences of logits, ``(batch, classes, classes)``; ``crown`` weighs CROWN's."""
        rows = pair_rows(self.objective.classes, box.lower)
        bounds = ibp(network, box, BoundOptions()).lower_bounds(rows)
        if crown > 0:
            bounds = crown * crown_ibp(network, box, BoundOptions()).lower_bounds(rows) + (1 - crown) * bounds
        return bounds.reshape(-1, self.objective.classes, self.objective.classes)


def _check_within(x: Tensor, config: Certified) -> None:
    """Compare in the samples' own type, in which 0.1 is a float32 and no more than a limit of 0.1."""
    if config.lower is None and config.upper is None:
        return  # the host waits for a device only if there is something to compare
    for extreme in x.detach().aminmax():
        below = config.lower is not None and bool(extreme < config.lower)
        above = config.upper is not None and bool(extreme > config.upper)
        if below or above:
            side, limits = "lower" if below else "upper", f"lower={config.lower}, upper={config.upper}"
            raise ValueError(f"objective.{side}: an input is {extreme.item():g}, outside of {limits}")


def pair_rows(classes: int, like: Tensor) -> Tensor:
    """Return ``e_i − e_j`` for all i and j, ``(1, classes², classes)``."""
    identity = torch.eye(classes, dtype=like.dtype, device=like.device)
    return (identity.unsqueeze(1) - identity.unsqueeze(0)).reshape(1, classes**2, classes)


def certified(config: Certified, context: ObjectiveContext) -> Objective:
    """Return the objective. Raises ``ValueError`` for tokens, which have no box around them."""
    if isinstance(context.samples, Features):
        return _CertifiedObjective(config, context, context.samples)
    raise ValueError(f"objective certified: a {context.config.family} reads tokens; expected a model of features")


def _margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return lower bounds of the target's logit minus each logit, ``(batch, classes)``; 0 at the target itself."""
    return outputs[torch.arange(len(targets), device=targets.device), 1 + targets]
