"""A recording of an iteration that needs no device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """Writes operators down as they run, and refuses those that a CUDA graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags))
        if function is torch.ops.aten.index.Tensor:
            waits = any(each is not None and each.dtype in {torch.bool, torch.uint8} for each in args[1])
        if waits or function is torch.ops.aten.lift_fresh.default:
            raise AssertionError(f"{function} needs the host")
        found = function(*args, **(kwargs or {}))
        self.written.append((function, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """On the tensors of then: what was new has a place now."""
        for function, args, kwargs, before in self.written:
            again = function(*args, **kwargs)
            many = isinstance(before, tuple | list)
            for new, old, told in zip(
                again if many else [again], before if many else [before], function._schema.returns, strict=False
            ):
                if isinstance(old, Tensor) and told.alias_info is None:
                    old.copy_(new)


class Rehearsed:
    """:class:`Recorded` without a device: written down the second time, then repeated without running any Python."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.runs = 0

    def run(self, body: Callable[[], None], times: int) -> None:
        for _ in range(times):
            if self.tape is not None:
                self.tape.replay()
            elif self.runs:
                self.tape = Tape()
                with self.tape:
                    body()
            else:
                body()
            self.runs += 1
