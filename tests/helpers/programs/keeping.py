"""Ways to keep the results of earlier steps: as copies, on the host or not, and as what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from programs.loops import State, StepOf
from service.compilation.program import Step

Way = Callable[[State, Tensor], Any]


def keeping(name: str, way: Way) -> StepOf:
    """A step that adds up the results of the last three, the earlier ones as ``way`` has kept them."""

    def step(state: State) -> Step:
        state.boundary.step_boundary()
        state.scores.append(way(state, state.call(state.batch())))
        if state.device.type == "cuda":
            torch.cuda.synchronize()  # a copy to the host that does not wait is there only then
        kept = [torch.as_tensor(each, device="cpu").double() for each in state.scores[-3:]]
        return Step(outputs={"scores": torch.stack(kept).sum(dim=0)})

    step.__name__ = name
    return step


def _in_a_thread(state: State, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    thread = Thread(target=lambda: kept.append(x.detach().cpu()))
    thread.start()
    thread.join()
    return kept[0]


COPIES: dict[str, Way] = {
    "cpu": lambda state, x: x.cpu(),
    "detach_cpu": lambda state, x: x.detach().cpu(),
    "to_name": lambda state, x: x.to("cpu"),
    "to_keyword": lambda state, x: x.to(device="cpu"),
    "to_name_and_type": lambda state, x: x.to("cpu", x.dtype),
    "to_device_object": lambda state, x: x.to(torch.device("cpu")),
    "to_without_waiting": lambda state, x: x.to("cpu", non_blocking=True),
    "as_tensor": lambda state, x: torch.as_tensor(x, device="cpu"),
    "numpy_of_cpu": lambda state, x: x.cpu().numpy(),
    "numpy_by_force": lambda state, x: x.numpy(force=True),
    "tolist": lambda state, x: x.tolist(),
    "items": lambda state, x: [[each.item() for each in row] for row in x],
    "clone": lambda state, x: x.clone(),
    "copy_into_a_buffer": lambda state, x: torch.empty_like(x).copy_(x),
    "other_type": lambda state, x: x.to(torch.float16),
    "view_of_cpu": lambda state, x: x.cpu().view(-1).view_as(x),
    "cpu_in_a_thread": _in_a_thread,
}
ALIASES: dict[str, Way] = {
    "as_it_is": lambda state, x: x,
    "detach": lambda state, x: x.detach(),
    "view": lambda state, x: x.view(-1).view_as(x),
    "to_own_device": lambda state, x: x.to(state.device),
    "to_device_of_a_tensor": lambda state, x: x.to(x.device),
    "to_own_type": lambda state, x: x.to(x.dtype),
    "to_own_type_and_device": lambda state, x: x.to(x.device, x.dtype),
    "like_another": lambda state, x: x.to(x),
    "contiguous": lambda state, x: x.contiguous(),
}
"""On a CUDA device too these give the same memory."""
