"""Saves the state of a program's training: its modules and optimizers, whatever those keep, by the modules' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from service.jobs.plugins import Evaluation
from service.jobs.spec.train import TrainSpec
from service.models import WeightsError
from service.parallel import checkpoint
from service.parallel.checkpoint import Checkpoint
from service.parallel.distributed import gather, rank_and_size
from service.training.checkpoints import MODEL_PREFIX, Checkpoints
from service.training.programs.failures import LackingError
from service.training.programs.setup import PreparedProgram

T = TypeVar("T")
_OPTIMIZERS, _BUILT = "optimizers", "built"
_Plain = str | int | float | bool | None


class ProgramCheckpoints(Checkpoints):
    """The checkpoints of a program's training. Raises :class:`LackingError` for state that they would lose."""

    def __init__(self, spec: TrainSpec, training: PreparedProgram) -> None:
        super().__init__(spec, training.context)
        self._training = training
        self._names = {id(value): name for name, value in training.parts.members().items()}
        for index, optimizer in enumerate(training.parts.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._name(index, optimizer, parameter)
        self._built = [[_settings(group) for group in each.param_groups] for each in training.parts.optimizers]

    def state(self) -> dict[str, Tensor]:
        state = {f"{MODEL_PREFIX}{name}": value.detach() for name, value in self._training.parts.members().items()}
        for index, optimizer in enumerate(self._training.parts.optimizers):
            for parameter, kept in optimizer.state.items():
                name = self._name(index, optimizer, parameter)
                tensors = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
                state |= {f"optimizer.{index}.{key}.{name}": value for key, value in tensors.items()}
        return state

    def save(self, step: int, loss: float, evaluations: Sequence[Evaluation]) -> None:
        self._check_alike()
        super().save(step, loss, evaluations)

    def _check_alike(self) -> None:
        """Raise :class:`LackingError` on every rank for a whole tensor that ranks have by one name, and that differs:
        a checkpoint has one of each.
        """
        if rank_and_size()[1] == 1:
            return
        plain = {name: value for name, value in self.state().items() if not isinstance(value, DTensor)}
        sums = gather({name: _checksum(value) for name, value in plain.items()})
        for name in dict.fromkeys(name for own in sums for name in own):
            if len({own[name] for own in sums if name in own}) > 1:
                raise LackingError(
                    f"program {self._training.config.name!r}: {name.removeprefix(MODEL_PREFIX)} differs between ranks; "
                    "a checkpoint holds what is equal on all, or a DTensor"
                )

    def about(self, step: int) -> dict[str, Any]:
        optimizers = self._training.parts.optimizers
        return {
            "program": self._training.config.model_dump(mode="json"),
            "package": self._training.origin["program.package"],
            "parallel": self._spec.parallel.model_dump(),
            _OPTIMIZERS: [self._described(index, optimizer) for index, optimizer in enumerate(optimizers)],
        }

    def load(self, found: Checkpoint | None) -> None:
        """Raises :class:`WeightsError` for a checkpoint of other modules or optimizers."""
        if found is None:
            return
        try:
            self._make_optimizer_states(found.meta[_OPTIMIZERS])
            checkpoint.load(found.path, self.state())
        except (KeyError, ValueError) as error:
            own = f"{self._training.config.name} of {self._training.origin['program.package']}"
            made_by = f"made by {found.meta.get('package')}"
            raise WeightsError(
                f"the checkpoint of step {found.step}, {made_by}, does not fit program {own}: {error}"
            ) from error

    def _make_optimizer_states(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give each optimizer the form of state that was saved, to be loaded into, and the settings that were saved,
        but for those that the program now builds otherwise.
        """
        parameters = self._training.parts.members()
        for index, (optimizer, described) in enumerate(_paired(self._training.parts.optimizers, saved, "optimizers")):
            if _BUILT not in described:
                self._log(f"the checkpoint does not say how optimizer {index} was built: all its settings are its own")
            pairs = _paired(optimizer.param_groups, described["groups"], "groups of an optimizer")
            for place, (group, values) in enumerate(pairs):
                changed = self._changed(index, place, described.get(_BUILT, ()))
                group |= {key: _like(group.get(key), value) for key, value in values.items() if key not in changed}
            for name, kept in described["state"].items():
                parameter = parameters[name]
                optimizer.state[parameter] = {key: _made(value, parameter) for key, value in kept.items()}

    def _changed(self, index: int, place: int, before: Sequence[Mapping[str, _Plain]]) -> set[str]:
        """Return the settings of a group that the program builds otherwise than ``before``, which are the new ones; a
        group that was added while it trained has none.
        """
        built, changed = self._built[index], set[str]()
        for was, now in zip(before[place : place + 1], built[place : place + 1], strict=False):
            plain = _plain_settings(now, f"optimizer {index}")
            for key, old in was.items():
                if not _differ(old, new := plain.get(key, old)):
                    continue
                stays = _decides_form(key, old, new)
                taken = f"stays {old}, which decides what is kept" if stays else f"is {new}, as built now; it was {old}"
                self._log(f"optimizer {index}, group {place}: {key} {taken}")
                changed |= set() if stays else {key}
        return changed

    def _described(self, index: int, optimizer: Optimizer) -> dict[str, Any]:
        """Return the settings of an optimizer, and the form of what it keeps for each parameter."""
        where = f"optimizer {index} ({type(optimizer).__name__})"
        groups = [_plain_settings(_settings(group), where) for group in optimizer.param_groups]
        built = [_plain_settings(group, where) for group in self._built[index]]
        state = {
            self._name(index, optimizer, parameter): {
                key: _form(value, parameter) if isinstance(value, Tensor) else _plain(value, f"{where} keeps {key!r}")
                for key, value in kept.items()
            }
            for parameter, kept in optimizer.state.items()
        }
        return {"groups": groups, _BUILT: built, "state": state}

    def _log(self, line: str) -> None:
        if self._training.context.rank == 0:
            self._training.context.report.log(line)

    def _name(self, index: int, optimizer: Optimizer, parameter: Tensor) -> str:
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise LackingError(
                f"program {self._training.config.name!r}: optimizer {index} ({type(optimizer).__name__}) has a tensor "
                f"of shape {list(parameter.shape)} that is in none of the modules "
                f"{', '.join(self._training.parts.modules)}: a checkpoint would lose it"
            ) from None


def _paired(here: Sequence[T], saved: Sequence[Any], what: str) -> Iterator[tuple[T, Any]]:
    if len(here) != len(saved):
        raise ValueError(f"it has {len(saved)} {what}, and here are {len(here)}")
    return zip(here, saved, strict=True)


def _checksum(value: Tensor) -> str:
    exact = value.detach().double()
    return f"{list(value.shape)} {exact.sum().item()!r} {exact.square().sum().item()!r}"


def _form(value: Tensor, parameter: Tensor) -> dict[str, Any]:
    like = value.shape == parameter.shape
    on_host = value.device.type == "cpu"
    return {
        "shape": None if like else list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "cpu": on_host,
    }


def _made(form: Any, parameter: Tensor) -> Any:
    """Return a tensor of a saved form, to be loaded into; any other value as it is."""
    if not isinstance(form, Mapping):
        return form
    dtype = getattr(torch, form["dtype"])
    if form["shape"] is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(form["shape"], dtype=dtype, device="cpu" if form["cpu"] else parameter.device)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group of parameters is updated with, as it is now."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _differ(old: Any, new: Any) -> bool:
    """Return whether two settings differ by more than the rounding of one that is kept in a tensor."""
    numbers = all(isinstance(each, int | float) for each in (old, new))
    return not isclose(old, new, rel_tol=1e-6) if numbers else bool(old != new)


def _decides_form(key: str, old: Any, new: Any) -> bool:
    """Return whether a setting decides which tensors an optimizer keeps, or where: a switch, or whether there is
    momentum.
    """
    is_switch = any(isinstance(each, bool) or each is None for each in (old, new))
    return is_switch or (key == "momentum" and bool(old) != bool(new))


def _plain_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {key: _plain(value, f"{where} has the setting {key!r}") for key, value in settings.items()}


def _plain(value: object, which: str) -> Any:
    """Return a value as JSON holds it. Raises :class:`LackingError` for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, _Plain):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, _Plain) for each in value):
        return list(value)
    raise LackingError(f"{which}, a {type(value).__name__}: a checkpoint holds tensors and numbers")


def _like(present: object, saved: Any) -> Any:
    """Return a saved setting in the type of the present one."""
    if isinstance(present, Tensor):
        return present.fill_(saved)
    return tuple(saved) if isinstance(present, tuple) else saved
