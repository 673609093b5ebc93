"""What the modules of all packages need: the package itself, names, flat samples, parts that do not learn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from service.jobs.runtime import RefusedError
from service.jobs.spec.families.packaged import PackagedConfig, PictureConfig

_UNDECLARED = re.compile(r"operator (torchvision::\w+) does not exist")


class PackagedError(RefusedError, ValueError):
    """A package is not there, or has no such model."""

    final = False


def imported(package: str) -> Any:
    """Return the package. Raises :class:`PackagedError` with its name if this host does not have it."""
    try:
        if find_spec("torchvision") is not None:
            _import_torchvision()  # as the others do, on their way
        return import_module(package)
    except ModuleNotFoundError as error:
        raise PackagedError(
            f"model.family: this host has no package {error.name!r}, which {package} needs; install it on every worker "
            "host, with the extra `families`"
        ) from error


def _import_torchvision() -> None:
    """Import torchvision. It asks for its compiled operators, which do not load beside another build of torch than
    theirs, as its CUDA build beside torch for CPUs. No classifier calls one: they are declared, without kernels.
    """
    while "torchvision" not in sys.modules:
        try:
            import_module("torchvision")
        except RuntimeError as error:
            if (named := _UNDECLARED.search(str(error))) is None:
                raise
            torch.library.define(named[1], "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def check_name(name: str, known: Collection[str], package: str, field: str = "model.name") -> None:
    """Raise :class:`PackagedError` with the nearest names for one that the package does not have."""
    if name not in known:
        raise PackagedError(f"{field}: {package} has no architecture {name!r}{nearest(name, known)}")


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of a sentence about an unknown name: the known ones that are nearest, if any are near."""
    found = get_close_matches(name, known, n=4, cutoff=0.5)
    return f"; nearest are {', '.join(found)}" if found else ""


@contextmanager
def explained(what: str, package: str) -> Iterator[None]:
    """Raise :class:`PackagedError` naming the field ``what`` for whatever the package raises about it."""
    try:
        yield
    except PackagedError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and torch.empty(0).is_meta:
            raise  # of a constructor that may look at values, which the meta device has not
        raise PackagedError(f"{what}: {package} cannot build it: {type(error).__name__}: {error}") from error


class Packaged(nn.Module):
    """A package's module as a network of ours: one tensor in, one tensor out.

    Frozen parts have no gradients, and stay in evaluation mode.
    """

    def __init__(self, config: PackagedConfig, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.frozen = tuple(self._frozen(config.frozen))

    def _frozen(self, beginnings: Collection[str]) -> Iterator[str]:
        """Yield the names of the modules that are frozen as a whole, after freezing the parameters."""
        parameters = dict(self.network.named_parameters())
        for each in beginnings:
            found = [name for name in parameters if name == each or name.startswith(f"{each}.")]
            if not found:
                others = get_close_matches(each, {name.rpartition(".")[0] for name in parameters}, n=4, cutoff=0.3)
                raise PackagedError(f"model.frozen: no parameter begins with {each!r}; nearest are {', '.join(others)}")
            for name in found:
                parameters[name].requires_grad_(False)
            if each not in parameters:
                yield each

    def train(self, mode: bool = True) -> Packaged:
        super().train(mode)
        for name in self.frozen:
            self.network.get_submodule(name).eval()
        return self


class Classifier(Packaged):
    """Pictures, flat or not, to logits ``(batch, classes)``."""

    def __init__(self, config: PictureConfig, network: nn.Module) -> None:
        super().__init__(config, network)
        self.in_shape, self.config_name = config.in_shape, config.name

    def forward(self, x: Tensor) -> Tensor:
        logits = self.network(x.reshape(-1, *self.in_shape))
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"model.name: {self.config_name} returns a {type(logits).__name__} in training; expected one tensor: "
                "look for an option that switches its other outputs off, such as aux_logits: false"
            )
        return logits


def classifier(config: PictureConfig, create: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Return the classifier that ``create`` builds by the architecture's name, from our arguments and the options."""
    with explained(f"model.options: {config.name}", config.package):
        return Classifier(config, create(config.name, **{**arguments, **config.options}))
