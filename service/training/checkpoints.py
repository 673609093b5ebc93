"""Saves the checkpoints of a run, and resumes from the newest; names the tensors in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from service.jobs.files import FILES
from service.jobs.plugins import Evaluation
from service.jobs.runtime import RunContext
from service.jobs.spec.train import TrainSpec
from service.models import WeightsError
from service.parallel import checkpoint
from service.parallel.checkpoint import BackgroundSaver, Checkpoint, DirectSaver, Saver
from service.parallel.distributed import from_first_rank, gather
from service.parallel.tensor.placement import global_parameters, global_tensors
from service.training.journal import readable_bytes
from service.training.optimizers import Updater
from service.training.setup import Training

MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."
_EVALUATIONS = "evaluations"
_BEHIND = "behind"
"""Where a checkpoint's description has the optimizer's counts that are not its step."""
Named = TypeVar("Named", bound=Tensor)
PassOver = Callable[[Checkpoint, str], None]
"""Is told of a damaged checkpoint, and what is wrong with it."""


class Checkpoints(ABC):
    """The checkpoints of a run. ``saved_step`` is the step of the job's newest one, if there is one.

    ``rows`` are those of ``service.parallel.checkpoint.save``.
    """

    def __init__(self, spec: TrainSpec, context: RunContext, rows: Mapping[str, int] | None = None) -> None:
        self._spec, self._context, self._rows = spec, context, rows
        kind = BackgroundSaver if spec.checkpoint.async_ else DirectSaver
        self.saver: Saver = kind(context.paths.checkpoints, spec.checkpoint.keep, rows, self._report_written)
        self.saved_step: int | None = None

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the run."""

    @abstractmethod
    def about(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of this step says beside its tensors, as plain values; all ranks call it."""

    @abstractmethod
    def load(self, found: Checkpoint | None) -> None:
        """Get the run ready to go on from a checkpoint, or to begin."""

    def take_up(self) -> Checkpoint | None:
        """Load the newest complete checkpoint of the job, else that of the job that it resumes, from any
        layout; ``None`` if there is neither.
        """
        own = newest_checkpoint(self._context.paths.checkpoints, pass_over=self._discard)
        newest = own or self._of_resumed_job()
        self.load(newest)
        self._say_what_is_not_whole(self._context.paths.checkpoints, own)
        self.saved_step = own.step if own else None
        return newest

    def save(self, step: int, loss: float, evaluations: Sequence[Evaluation]) -> None:
        """Take a checkpoint; its write may end later. ``evaluations`` are those on which the course depends."""
        meta = {**self.about(step), "loss": loss}
        if evaluations:
            meta[_EVALUATIONS] = [[each.step, dict(each.metrics)] for each in evaluations]
        self.saver.save(step, self.state(), meta)
        self.saved_step = step

    def _report_written(self, written: Checkpoint) -> None:
        """Log a checkpoint that is complete on disk."""
        if self._context.rank == 0:
            size = readable_bytes(sum(written.meta[FILES].values()))
            self._context.report.log(f"checkpoint of step {written.step:,}: {size}")

    def _of_resumed_job(self) -> Checkpoint | None:
        """Return the checkpoint of another job that the spec resumes. Raises :class:`WeightsError` without one."""
        if (resume := self._spec.resume) is None:
            return None
        folder = self._context.data.job(resume.job).checkpoints
        step = None if resume.step == "latest" else resume.step
        found = newest_checkpoint(folder, step, pass_over=self._pass_over)
        if found is None:
            left = [each.step for each in checkpoint.complete(folder)]
            raise WeightsError(f"{resume.job} has no checkpoint of step {resume.step!r}; there are {left or 'none'}")
        if step is None:
            self._say_what_is_not_whole(folder, found)
        return found

    def _say_what_is_not_whole(self, folder: Path, taken: Checkpoint | None) -> None:
        context = self._context
        for step in checkpoint.incomplete(folder, -1 if taken is None else taken.step) if context.rank == 0 else ():
            context.report.log(f"the checkpoint of step {step} is not whole: a file is missing, cut short or changed")

    def _pass_over(self, damaged: Checkpoint, why: str) -> None:
        """Say that a damaged checkpoint is passed over."""
        context = self._context
        if context.rank == 0:
            line = f"the checkpoint of step {damaged.step} is damaged: {why}"
            context.report.log(f"{line}; it is passed over")

    def _discard(self, damaged: Checkpoint, why: str) -> None:
        """Do the same for one of this job, and make room for another of that step."""
        self._pass_over(damaged, why)
        checkpoint.on_first_rank(lambda: checkpoint.discard(damaged), f"discard {damaged.path}")


class ModelCheckpoints(Checkpoints):
    """The checkpoints of a model's training."""

    def __init__(self, training: Training) -> None:
        self._training = training
        rows = _training_rows(training.outline.rows, training.updater)
        super().__init__(training.spec, training.context, rows)

    def load(self, found: Checkpoint | None) -> None:
        training = self._training
        behind = found.meta.get(_BEHIND, {}) if found else {}
        counts: dict[Tensor, int] = {each: behind[name] for name, each in self._parameters() if name in behind}
        training.updater.prime(found.step if found else 0, counts)
        self.saver.expect(self.state())
        if found is None:
            return
        _check_same_data(found, training.origin)
        checkpoint.load(found.path, self.state(), rows=self._rows)
        training.tied.take_up(training.updater.moments)

    def about(self, step: int) -> dict[str, Any]:
        config = self._training.outline.config.model_dump(mode="json")
        return {"model": config, **self._training.origin, _BEHIND: self._behind(step)}

    def _behind(self, step: int) -> dict[str, int]:
        """Return, by name, the optimizer's counts of parameters that lacked a gradient in a step; all ranks call it."""
        counts = self._training.updater.behind(step)
        own = {name: counts[each] for name, each in self._parameters() if each in counts}
        return {name: count for each in gather(own) for name, count in each.items()}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self._training.stages.values():
            yield from global_parameters(stage)

    def state(self) -> dict[str, Tensor]:
        training = self._training
        return _training_tensors(training.stages.values(), training.updater)


def evaluations_of(saved: Checkpoint) -> list[Evaluation]:
    """Return the evaluations that a checkpoint has, oldest first."""
    return [Evaluation(step, metrics) for step, metrics in saved.meta.get(_EVALUATIONS, ())]


def newest_checkpoint(
    folder: Path, step: int | None = None, *, pass_over: PassOver = lambda path, why: None
) -> Checkpoint | None:
    """Return the newest whole checkpoint that the first rank sees, or that of a step; a shared folder may look
    different elsewhere. ``pass_over`` is called for newer ones that are damaged, on every rank.

    Raises :class:`WeightsError` for damage to the checkpoint of that step.
    """
    candidates = checkpoint.complete(folder) if step is None else [checkpoint.read(folder / f"step_{step}")]
    steps = [each.step for each in candidates if each is not None]
    while (newest := from_first_rank(steps.pop() if steps else None)) is not None:
        found = checkpoint.require(folder / f"step_{newest}")
        damaged = checkpoint.damage(found)
        if damaged is None:
            return found
        why = f"{damaged} has changed since it was written"
        if step is not None:
            raise WeightsError(f"the checkpoint of step {step} is damaged: {why}; resume from another, or from latest")
        pass_over(found, why)
    return None


def _check_same_data(saved: Checkpoint, origin: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the run was trained on other samples, by a digest that the checkpoint has of them."""
    for name in ("data_sha256", "labels_sha256"):
        recorded = saved.meta.get(name, origin[name])
        if recorded != origin[name]:
            own = f"{origin[name]} ({name})"
            raise ValueError(
                f"{saved.path} was trained on data {recorded}, but here it is {own}: its loader gives "
                "other samples than then. A built-in text comes with the Python version; a package may take files in "
                "the order of a folder, or classes in that of a set"
            )


def _first_of_each(
    modules: Iterable[nn.Module], tensors: Callable[[nn.Module], Iterator[tuple[str, Named]]]
) -> dict[str, Named]:
    """Return what ``tensors`` yields of this rank's stages by its global names.

    Of a tied parameter whose two copies are both here, only the first is given.
    """
    found: dict[str, Named] = {}
    for module in modules:
        for name, tensor in tensors(module):
            found.setdefault(name, tensor)
    return found


def model_tensors(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers as checkpoints name them."""
    found = _first_of_each(modules, global_tensors)
    return {f"{MODEL_PREFIX}{name}": tensor.detach() for name, tensor in found.items()}


def _training_tensors(modules: Iterable[nn.Module], updater: Updater) -> dict[str, Tensor]:
    """Return the model and the optimizer's moments, as views: loading into them restores the run."""
    modules = list(modules)
    return model_tensors(modules) | {
        f"{_OPTIMIZER_PREFIX}{moment}.{name}": value
        for name, parameter in _first_of_each(modules, global_parameters).items()
        for moment, value in updater.moments(parameter).items()
    }


def _training_rows(known: Mapping[str, int], updater: Updater) -> dict[str, int]:
    """Return, by the same names, the rows without padding of each padded tensor, from those of the parameters."""
    kept = {moment for rule in updater.rules for moment in rule.moments}
    of_moments = {f"{_OPTIMIZER_PREFIX}{moment}.{name}": rows for name, rows in known.items() for moment in kept}
    return {f"{MODEL_PREFIX}{name}": rows for name, rows in known.items()} | of_moments
