"""Defines the interface of objectives; a package with its own derives from :class:`Objective`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from service.jobs.plugins import ModelConfig, ObjectiveConfig, Samples
from service.jobs.spec.objective import OBJECTIVES
from service.models.plain import PlainModel
from service.parallel.fsdp import is_static
from service.parallel.mesh import Axis, Mesh
from service.parallel.pipeline.stage import Part


@dataclass(frozen=True)
class ObjectiveContext:
    """Tells an objective its model, samples and mesh. ``axis`` divides the last dimension of the outputs."""

    config: ModelConfig
    samples: Samples
    mesh: Mesh
    axis: Axis


class Objective(ABC):
    """Minimised per label that counts: of a sample, or of a token in sequences of one length.

    ``outputs`` come from the last stage, batch first; ``targets`` are int64, ``(batch,)`` or ``(batch, seq)``. Every
    rank has an objective of its own; all ranks call the same methods in the same order.
    """

    measures: int
    """The length of :meth:`totals`."""
    ignores: ClassVar[bool] = False
    """Whether :meth:`mean` and :meth:`totals` leave out labels of ``service.jobs.plugins.IGNORED``, and are zero where
    no label counts. Data with such labels are refused without it.
    """

    @abstractmethod
    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the labels of a micro-batch that count, a scalar that is differentiated."""

    @abstractmethod
    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sums over the samples for evaluation, float64 ``(measures,)``; zeros for no samples."""

    @abstractmethod
    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        """Return evaluation metrics, named ``eval_…``, from the totals over all ranks."""

    def begin(self, step: int) -> None:  # noqa: B027 - most objectives are the same at every step
        """Prepare for ``step``, counted from 0, before it runs, and before an evaluation after it. Anything that
        changes in training must depend on it alone: attributes that :meth:`mean` changes are refused.
        """

    def adapt(self, stage: nn.Module, part: Part) -> None:  # noqa: B027 - most need the outputs only
        """Adapt a stage of this rank; called once for each after its construction, before it is sharded."""

    def units(self, stage: nn.Module) -> Iterable[nn.Module]:
        """Return the modules that the stage's forward calls as a whole, on all ranks: FSDP gathers each separately.

        Of a stage that does not say that it uses all of its blocks, ranks that skip others would wait for each other,
        or get each other's parameters.
        """
        blocks = getattr(stage, "blocks", None)
        is_certain = is_static(stage) or isinstance(stage, PlainModel)
        return blocks.values() if isinstance(blocks, nn.ModuleDict) and is_certain else ()


def check_learns_nothing(objective: Objective, known: Collection[Tensor]) -> None:
    """Call after a backward. Raises ``ValueError`` for a parameter of the objective's own that has a gradient: no
    optimizer updates it. ``known`` are those of the model, of which it may have some.
    """
    own = vars(objective) if not isinstance(objective, nn.Module) else {"": objective}
    updated = set(map(id, known))
    for name, value in own.items():
        for path, each in value.named_parameters(name) if isinstance(value, nn.Module) else [(name, value)]:
            if isinstance(each, nn.Parameter) and id(each) not in updated and each.grad is not None:
                raise ValueError(
                    f"the parameter {path!r} of {type(objective).__name__} has a gradient, and no optimizer updates "
                    "what an objective holds; expected it in the model, or under requires_grad_(False)"
                )


Factory = Callable[[Any, ObjectiveContext], Objective]
"""Makes an objective from its configuration; an :class:`~service.jobs.plugins.ObjectiveKind` names one."""


def objective_for(config: ObjectiveConfig, context: ObjectiveContext) -> Objective:
    """Return the objective of that name; raises ``ValueError`` for one that this process does not know."""
    factory: Factory = OBJECTIVES.function(config.name)
    return factory(config, context)
