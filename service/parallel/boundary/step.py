"""Defines the boundary between steps, and checks that the backward of every forward has run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from service.parallel.boundary.lifetimes import CallCounter, CallSite, Invocation, Origin, caller
from service.parallel.boundary.watch import StepWatch
from service.parallel.containers import map_tensors, tensors_in

HERE = ("service/parallel/boundary/", "service\\parallel\\boundary\\")


class StepBoundary:
    """Begins the steps of one loop and makes its calls of compiled modules.

    ``modules``: what the loop calls, by name, compiled (or not) before the first step. Results of a call hold until
    the next :meth:`step_boundary`; those of the modules named in ``kept`` are copied once and hold for good.

    The CUDA-graph step mark is global to the process: this is the only place that sets it, and of the loops of a
    process one runs at a time.
    """

    def __init__(self, modules: Mapping[str, Callable[..., Any]], *, kept: Collection[str] = ()) -> None:
        unknown = sorted(set(kept) - modules.keys())
        if unknown:
            raise ValueError(f"kept names {unknown[0]!r}, which is none of the modules: {', '.join(modules)}")
        self.modules, self.kept = dict(modules), frozenset(kept)
        self.step = -1
        self.on_begin: Callable[[], None] | None = None
        """Is called once, when the next step begins."""
        self._names = {id(module): name for name, module in self.modules.items()}
        self._calls_made, self._pending = CallCounter(), PendingBackwards()
        self._watch: StepWatch | None = None
        self._next_watch: StepWatch | None = None
        self._compiled: frozenset[str] | None = None

    def watch_next(self, watch: StepWatch) -> None:
        """Let ``watch`` record the step that begins next."""
        self._next_watch = watch

    def step_boundary(self) -> None:
        """Begin a step: nothing of the previous one is needed any more.

        Raises :class:`PendingBackwardError`, naming both places, if a backward is still to run.
        """
        if origins := self._pending.origins():
            raise PendingBackwardError(caller(outside=HERE), origins)
        if self._compiled is None:
            self._compiled = frozenset(name for name, module in self.modules.items() if is_compiled(module))
        self.step += 1
        self._watch, self._next_watch = self._next_watch, None
        if self._watch is not None:
            self._watch.step = self.step
        begin, self.on_begin = self.on_begin, None
        if begin is not None:
            begin()
        if self._compiled:
            # Without a compiled module there is nothing to mark, and the mark would import all of Inductor.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def boundary_call(self, module: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return ``module(*arguments, **named)``, counted, copied if its results are kept; never marks a step."""
        name = self._names.get(id(module)) or type(module).__name__
        self._calls_made.add(name, module, (arguments, named))
        if self._watch is not None:
            self._watch.add(name, module, (arguments, named))
        results = module(*arguments, **named)
        self._note(name, module, results, (arguments, named))
        if name in self.kept and name in (self._compiled or ()):
            return map_tensors(results, Tensor.clone)
        return results

    def invocations(self) -> dict[Invocation, int]:
        """Return the calls so far, by module, phase, grad mode, thread and shapes."""
        return self._calls_made.counts()

    def _note(self, name: str, module: Callable[..., Any], results: Any, arguments: Any) -> None:
        gradients, watch = torch.is_grad_enabled(), self._watch
        if not gradients and watch is None:
            return
        origin = Origin(name, caller(outside=HERE), self.step)
        outputs = list(tensors_in(results))
        if gradients:
            self._pending.note(origin, outputs)
        if watch is not None:
            own = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
            watch.note(origin, outputs, (*tensors_in(arguments), *own))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether ``torch.compile`` was applied to the function, or to the module or a part of it."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        return True
    parts = function.modules() if isinstance(function, nn.Module) else ()
    return any(getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod") for part in parts)


_PRUNE_FROM = 512


class PendingBackwardError(RuntimeError):
    """A step was begun at ``site`` before the backwards of ``origins`` had run."""

    def __init__(self, site: CallSite, origins: tuple[Origin, ...]) -> None:
        calls = "; ".join(dict.fromkeys(map(str, origins)))
        super().__init__(
            f"a step begins at {site} while {len(origins)} backward(s) are still to run, of {calls}: "
            "replays of the new step would overwrite what those backwards have saved; "
            "run them first, or drop (or detach) the outputs"
        )
        self.site, self.origins = site, origins


class _Ran:
    """A hook that lives as long as the autograd nodes of a call, and knows whether any of them has run."""

    __slots__ = ("__weakref__", "on_run", "origin", "ran")

    def __init__(self, origin: Origin, on_run: Callable[[Origin], None]) -> None:
        self.origin, self.ran, self.on_run = origin, False, on_run

    def __call__(self, *_: Any) -> None:
        self.ran = True
        self.on_run(self.origin)


class PendingBackwards:
    """Watches forwards whose autograd nodes are alive and have not run.

    Holds neither tensors nor graphs. ``on_run`` hears of each when it runs.
    """

    def __init__(self, on_run: Callable[[Origin], None] = lambda origin: None) -> None:
        self.on_run = on_run
        self._hooks: list[weakref.ref[_Ran]] = []
        self._prune_at = _PRUNE_FROM

    def note(self, origin: Origin, outputs: Iterable[Tensor]) -> None:
        """Watch the backward of a call's outputs: it has run where it came through any of them, since those on which
        no loss depends never get one, though a loop's variables hold them.
        """
        nodes = {node for output in outputs if (node := output.grad_fn) is not None}
        hook = _Ran(origin, self.on_run)
        for node in nodes:
            node.register_hook(hook)
        self._hooks += [weakref.ref(hook)] if nodes else []
        if len(self._hooks) > self._prune_at:
            self._prune_at = max(_PRUNE_FROM, 2 * len(self.origins()))

    def origins(self) -> tuple[Origin, ...]:
        """Return the calls whose backward is still to run, oldest first."""
        hooks = [(reference, reference()) for reference in self._hooks]
        alive = [(reference, hook) for reference, hook in hooks if hook is not None and not hook.ran]
        self._hooks = [reference for reference, _ in alive]
        return tuple(hook.origin for _, hook in alive)
