"""The two arithmetics of bounds: floating point rounded to nearest, and with every rounding accounted for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from service.bounds.methods import Bounder, Method
from service.bounds.network import Network
from service.bounds.softmax_sums import with_softmax_sums
from service.parallel.tensor import local_copy

T = TypeVar("T")


class Arithmetic(ABC):
    """The arithmetic of an engine, and what it asks of a search.

    ``dtype`` is the type in which a job computes its bounds; ``note`` follows a method's name in results. ``refines``
    says that a search may tighten intermediate bounds by methods that have no rigorous form.
    """

    dtype: torch.dtype
    note: str
    refines: bool

    @abstractmethod
    def for_numbers(self, dtype: torch.dtype) -> Arithmetic:
        """Return this arithmetic for a model that computes in ``dtype``."""

    @abstractmethod
    def bounder(self, method: Method) -> Bounder:
        """Return what bounds a network by ``method`` in this arithmetic."""

    @abstractmethod
    def module_to_bound(self, module: nn.Module) -> nn.Module:
        """Return the module to bound: one of the same function, in the type that this arithmetic takes."""

    @abstractmethod
    def for_activation_search(self, network: Network) -> Network:
        """Return the network with the tightest relaxations that a search over activations may use."""

    @abstractmethod
    def certifying(self, make: Callable[[], T]) -> T | None:
        """Return what ``make`` gives where a claim has to be checked over the reals, and ``None`` where it has not."""


@dataclass(frozen=True)
class _PlainArithmetic(Arithmetic):
    """Floating point of the model's own width, rounded to nearest: margins for rounding are estimates."""

    dtype: torch.dtype
    note: str = ""
    refines: bool = True

    def for_numbers(self, dtype: torch.dtype) -> Arithmetic:
        return PLAIN_DOUBLE if dtype == torch.float64 else PLAIN

    def bounder(self, method: Method) -> Bounder:
        return method.plain

    def module_to_bound(self, module: nn.Module) -> nn.Module:
        return module

    def for_activation_search(self, network: Network) -> Network:
        return with_softmax_sums(network)

    def certifying(self, make: Callable[[], T]) -> T | None:
        return None


class _RigorousArithmetic(Arithmetic):
    """Float64 with every rounding accounted for: bounds hold for the function over the reals."""

    dtype, note, refines = torch.float64, " (rigorous)", False

    def for_numbers(self, dtype: torch.dtype) -> Arithmetic:
        return self

    def bounder(self, method: Method) -> Bounder:
        return method.rigorous

    def module_to_bound(self, module: nn.Module) -> nn.Module:
        return local_copy(module).double()

    def for_activation_search(self, network: Network) -> Network:
        return network

    def certifying(self, make: Callable[[], T]) -> T | None:
        return make()


PLAIN: Arithmetic = _PlainArithmetic(torch.float32)
PLAIN_DOUBLE: Arithmetic = _PlainArithmetic(torch.float64)
RIGOROUS: Arithmetic = _RigorousArithmetic()
