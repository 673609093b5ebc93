"""Watches the use of modules in one step: calls, calls from within a backward, and results that outlive the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from service.parallel.boundary.lifetimes import CallCounter, HeldResult, LiveResults, Origin
from service.torch_internals.table import internal_if_there, internal_of

Parts = Mapping[str, Sequence[nn.Module]]
"""Modules within those that a loop calls, by a name that alike ones share."""


class StepWatch:
    """Records one step, or as much of it as runs within :meth:`over`.

    ``calls`` and ``reentries``, those of the calls that began within a backward, count the modules that the loop calls
    across its boundary, and ``parts`` in them. Results are those that calls across the boundary have returned.
    """

    def __init__(self, parts: Parts = MappingProxyType({})) -> None:
        self.parts = parts
        self.calls, self.reentries = CallCounter(), CallCounter()
        self.step = -1
        """The step of the boundary, counted from 0; before it has begun, -1."""
        self._results = LiveResults()

    @contextmanager
    def over(self) -> Iterator[StepWatch]:
        """Count calls of parts within. Compiled ones are heard outside of their graphs, others by hooks."""
        with ExitStack() as stack:
            for name, modules in self.parts.items():
                for module in modules:
                    if _is_compiled(module):
                        stack.enter_context(intercepted(module, partial(self._called_compiled, name, module)))
                    else:
                        heard = partial(self._heard, name)
                        stack.callback(module.register_forward_pre_hook(heard, with_kwargs=True).remove)
            yield self

    def add(self, name: str, function: Callable[..., Any], arguments: Any) -> None:
        """Count a call."""
        self.calls.add(name, function, arguments)
        if in_backward():
            self.reentries.add(name, function, arguments)

    def note(self, origin: Origin, outputs: Iterable[Tensor], aliased: Iterable[Tensor]) -> None:
        """Watch the results of a call, except those in the memory of ``aliased``."""
        self._results.note(origin, outputs, aliased)

    def outliving(self) -> tuple[HeldResult, ...]:
        """Return the results that are still alive, with their holders: called when another step has ended, this names
        those that outlive their own by a whole one. Looks at every object, for 0.1 s or more, if there are any.
        """
        return self._results.held(self.step + 1)

    def _heard(self, name: str, module: nn.Module, arguments: Any, named: Any) -> None:
        self.add(name, module, (arguments, named))

    def _called_compiled(
        self, name: str, module: nn.Module, run: Callable[..., Any], arguments: Any, named: Any
    ) -> Any:
        self.add(name, module, (arguments, named))
        return run(*arguments, **named)


@contextmanager
def intercepted(unit: nn.Module, call: Callable[[Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """Let ``call(run, arguments, named)`` make the calls of a compiled unit, which ``run(*arguments, **named)`` runs.

    Hooks on the module would become part of its graphs.
    """
    compiled: Any = internal_of(unit, "torch.nn.Module._compiled_call_impl")

    def intercept(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # called from another compiled module, as part of its graph
            return compiled(*arguments, **named)
        return call(compiled, arguments, named)

    unit._compiled_call_impl = intercept
    try:
        yield
    finally:
        unit._compiled_call_impl = compiled


def in_backward() -> bool:
    """Return whether this thread runs within a backward; ``False`` if torch does not tell."""
    task = internal_if_there("torch._C._current_graph_task_id")
    return bool(task and task() != -1)


def parts_of(model: nn.Module) -> Parts:
    """Return a model's ``blocks``, and what each of them is made of: ``blocks.attention`` of all. Within a compiled
    module no calls are heard, so it has no parts.
    """
    blocks = getattr(model, "blocks", None)
    if _is_compiled(model) or not isinstance(blocks, nn.ModuleDict):
        return {}
    found: dict[str, list[nn.Module]] = {"blocks": list(blocks.values())}
    for block in blocks.values():
        for name, part in () if _is_compiled(block) else block.named_children():
            found.setdefault(f"blocks.{name}", []).append(part)
    return found


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
