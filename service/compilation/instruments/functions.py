"""Records the torch functions that a program calls in eager code, as ``TorchFunctionMode`` shows them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from service.compilation.instruments.backward import BACKWARD
from service.parallel.boundary.lifetimes import address_of
from service.parallel.containers import tensors_in
from service.torch_internals.table import internal

ABOUT = frozenset({"__get__", "__set__", "requires_grad_", "detach_", "share_memory_", "register_hook"})
_AS_ANOTHER = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Functions that need only the shape or type of their other tensor."""
_VALUES = frozenset(
    {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__setitem__", "__bool__", "__int__", "__float__"}
    | {"__complex__", "__index__", "__array__", "__contains__", "__repr__", "__format__", "__reduce_ex__"}
)
"""Functions that return numbers, or use them, and no tensor."""


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def unobserved(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return the function with its queries of tensors hidden from :class:`EagerFunctions`: a monitor must not
    record itself, nor take a tensor's refusal to tell its address for a read.
    """

    @wraps(function)
    def hidden(*arguments: _Given.args, **named: _Given.kwargs) -> _Result:
        with internal("torch._C.DisableTorchFunction")():
            return function(*arguments, **named)

    return hidden


@dataclass(frozen=True)
class FunctionCall:
    """A call of a torch function or of a tensor's method; attributes of tensors are read by their ``__get__``."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    named: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", ""))

    def run(self) -> Any:
        return self.function(*self.arguments, **self.named)

    @property
    def asks_about(self) -> bool:
        """Return whether a function needs no numbers of any tensor: shapes, types and settings at most."""
        return self.name in ABOUT or self.name.endswith("_like") or self.name.startswith("new_")

    @property
    def gives_gradient(self) -> bool:
        """Return whether the call reads the ``grad`` of a tensor."""
        return self.name == "__get__" and getattr(self.function, "__self__", None) is Tensor.grad

    def reads(self, tensor: Tensor, result: Any) -> bool:
        """Return whether the call, with this ``result``, needs the numbers in ``tensor``, not only a view of them."""
        if self.asks_about or (self.name in _AS_ANOTHER and tensor is not self.arguments[0]):
            return False
        if self.name.endswith("_") and not self.name.endswith("__"):
            return True
        made = list(tensors_in(result))
        if not made:
            return self.name in _VALUES
        return any(address_of(each) != address_of(tensor) for each in made)


class EagerFunctions(TorchFunctionMode):
    """Makes each torch function's call through ``around``, also in every thread that is started meanwhile.

    Functions called while it is :meth:`suspended` are left out, and so are, unless ``in_backwards``, those of a
    backward: a compiler may run there. ``on_backward`` is called when one begins, and ``after_backward`` when it has
    ended.
    """

    def __init__(
        self,
        around: Callable[[FunctionCall], Any],
        on_backward: Callable[[], None],
        after_backward: Callable[[], None] = lambda: None,
        *,
        in_backwards: bool,
    ) -> None:
        super().__init__()
        self.around, self.in_backwards = around, in_backwards
        self.on_backward, self.after_backward = on_backward, after_backward
        self._thread = threading.local()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # a function that the program itself has compiled
            return func(*args, **(kwargs or {}))
        return self.around(FunctionCall(func, args, kwargs or {}))

    @contextmanager
    def active(self) -> Iterator[None]:
        run = threading.Thread.run

        def observed(thread: threading.Thread) -> None:
            with self:
                run(thread)

        with ExitStack() as stack:
            stack.enter_context(patch.object(threading.Thread, "run", observed))
            stack.enter_context(patch(BACKWARD, self._running(internal(BACKWARD))))
            stack.enter_context(self)
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave this mode in this thread, within: code compiled meanwhile would hold it in its graphs and guards."""
        with self._stack(lambda others: others):
            outer, self._thread.suspended = self._is_suspended, True
            try:
                yield
            finally:
                self._thread.suspended = outer

    @property
    def _is_suspended(self) -> bool:
        return getattr(self._thread, "suspended", False)

    def _running(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` of autograd, with this mode or suspended."""

        def run(*arguments: Any, **named: Any) -> Any:
            entered = self.in_backwards and not self._is_suspended
            if not self._is_suspended:
                self.on_backward()
            with self._stack(lambda others: [*others, self]) if entered else self.suspended():
                result = function(*arguments, **named)
            if not self._is_suspended:
                self.after_backward()
            return result

        return run

    @contextmanager
    def _stack(self, of: Callable[[list[TorchFunctionMode]], list[TorchFunctionMode]]) -> Iterator[None]:
        """Enter, within, the modes that ``of`` makes of this thread's others."""
        modes = _modes()
        _replace(of([mode for mode in modes if mode is not self]))
        try:
            yield
        finally:
            _replace(modes)


def _modes() -> list[TorchFunctionMode]:
    """Return this thread's stack."""
    return list(internal("torch.overrides._get_current_function_mode_stack")())


def _replace(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in _modes():
        internal("torch.overrides._pop_mode")()
    for mode in modes:
        internal("torch.overrides._push_mode")(mode)
