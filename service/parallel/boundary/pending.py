"""Forwards whose backward has not run: what the next step's replays would write over is still needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from service.parallel.boundary.calls import CallSite, Origin

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
    """A hook that lives as long as its autograd node, and knows whether the node has run."""

    __slots__ = ("__weakref__", "on_run", "origin", "ran")

    def __init__(self, origin: Origin, on_run: Callable[[Origin], None]) -> None:
        self.origin, self.ran, self.on_run = origin, False, on_run

    def __call__(self, *_: Any) -> None:
        self.ran = True
        self.on_run(self.origin)


class PendingBackwards:
    """Holds the forwards noted so far whose autograd nodes are alive and have not run. Holds neither tensors nor
    graphs.

    ``on_run`` is told of each when it runs.
    """

    def __init__(self, on_run: Callable[[Origin], None] = lambda origin: None) -> None:
        self.on_run = on_run
        self._hooks: list[weakref.ref[_Ran]] = []
        self._prune_at = _PRUNE_FROM

    def note(self, origin: Origin, outputs: Iterable[Tensor]) -> None:
        """Watch the backward of a call's outputs."""
        nodes = {node for output in outputs if (node := output.grad_fn) is not None}
        for node in nodes:
            hook = _Ran(origin, self.on_run)
            node.register_hook(hook)
            self._hooks.append(weakref.ref(hook))
        if len(self._hooks) > self._prune_at:
            self._prune_at = max(_PRUNE_FROM, 2 * len(self.origins()))

    def origins(self) -> tuple[Origin, ...]:
        """Return the calls whose backward is still to run, oldest first."""
        hooks = [(reference, reference()) for reference in self._hooks]
        alive = [(reference, hook) for reference, hook in hooks if hook is not None and not hook.ran]
        self._hooks = [reference for reference, _ in alive]
        return tuple(hook.origin for _, hook in alive)
