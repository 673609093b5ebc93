"""Captures a module as a :class:`Graph`: ``torch.export`` with a symbolic batch, decomposed to core ATen.

Collectives (``trivet::*``) are operators of their own and stay in the graph. Parameters are this rank's local
tensors. Values that depend only on parameters are computed once, when parameters are put in, and can be differentiated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from service.bounds.graph import Graph, UnsupportedModelError
from service.bounds.operators import OPERATORS

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# What traces takes as long to import as torch itself, and a network whose trace is kept needs none of it.

EXAMPLE_BATCH = 3  # 0 and 1 would be specialised; any other size stays symbolic


class _Functional(nn.Module):
    """Calls a module with parameters that are given as inputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that its parameters are not registered here

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Any:
        from service.bounds.dtensors import plain, stand_ins  # noqa: PLC0415 - as said above

        module, before = self._module[0], dict[str, Tensor]()
        hooks = [
            module.register_forward_pre_hook(lambda *_: before.update(_tensors(module))),
            module.register_forward_hook(lambda *_: _check_kept(before, _tensors(module))),
        ]
        try:
            return plain(torch.func.functional_call(module, stand_ins(module, state), (x,)))
        finally:
            for hook in hooks:
                hook.remove()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every tensor that a module has, by name: parameters, buffers and plain attributes."""
    found = dict[str, Tensor]()
    for prefix, each in module.named_modules():
        for held in (vars(each), each._parameters, each._buffers):
            found |= {
                f"{prefix}.{name}".lstrip("."): value for name, value in held.items() if isinstance(value, Tensor)
            }
    return found


def _check_kept(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Check that a run has left every tensor in place: a replaced tensor could change the next run."""
    for name, tensor in after.items():
        if name in before and tensor is not before[name]:
            raise UnsupportedModelError(f"each run assigns another tensor to {name!r}, so no two need to give the same")


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced module whose parameters are still open."""

    program: ExportedProgram

    def graph(self, state: Mapping[str, Tensor]) -> Graph:
        """Return the graph over these parameters and buffers, by name and in the module's order; gradients reach them.

        Raises :class:`UnsupportedModelError` when an instance's result may depend on another's, or when the module does
        not return one tensor.
        """
        from service.bounds.exported import GraphBuilder  # noqa: PLC0415 - as said above

        return GraphBuilder(self.program, state).build()


def local_state(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters and buffers by name, in the form that a trace takes."""
    from service.parallel.tensor.placement import local  # noqa: PLC0415 - as said above

    return {name: local(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def trace(module: nn.Module, input_shape: Sequence[int]) -> Trace:
    """Trace ``module`` in evaluation mode, for inputs ``(batch, *input_shape)`` of the parameters' dtype.

    Raises :class:`UnsupportedModelError` when it cannot be traced with a batch of any size.
    """
    state = {name: tensor.detach() for name, tensor in local_state(module).items()}
    # A shared module keeps the tracer's tensors: torch restores only what it found on its last path.
    held = [(each, each.training, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    module.eval()
    try:
        return Trace(_export(module, state, tuple(input_shape)))
    finally:
        for each, training, parameters, buffers in held:
            each.training = training  # layers that stay as they are in evaluation may be among those in training
            each._parameters.update(parameters)
            each._buffers.update(buffers)


def capture(module: nn.Module, input_shape: Sequence[int]) -> Graph:
    """Return the graph of ``module`` with its present parameters, for inputs ``(batch, *input_shape)`` of their dtype.

    Raises :class:`UnsupportedModelError`, see :func:`trace` and :meth:`Trace.graph`.
    """
    state = {name: tensor.detach() for name, tensor in local_state(module).items()}
    return trace(module, input_shape).graph(state)


def _export(module: nn.Module, state: dict[str, Tensor], input_shape: tuple[int, ...]) -> ExportedProgram:
    from torch.export import Dim, export  # noqa: PLC0415 - as said above
    from torch.fx.traceback import preserve_node_meta  # noqa: PLC0415

    from service.bounds.decompositions.table import decomposed  # noqa: PLC0415
    from service.bounds.dtensors import stood_in  # noqa: PLC0415
    from service.bounds.functional import recognised  # noqa: PLC0415

    like = next((tensor for tensor in state.values() if tensor.is_floating_point()), torch.empty(0))
    example = torch.zeros(EXAMPLE_BATCH, *input_shape, dtype=like.dtype, device=like.device)
    shapes = {"x": {0: Dim("batch")}, "state": dict.fromkeys(state)}
    whole = frozenset(name for name, operator in OPERATORS.items() if operator.composite)
    try:
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            recognised(),
            stood_in(),
            preserve_node_meta() if getattr(module, "names_operations", False) else nullcontext(),
        ):
            warnings.simplefilter("ignore", FutureWarning)
            exported = export(_Functional(module), (example, state), dynamic_shapes=shapes, strict=False)
            return decomposed(exported, whole, OPERATORS)
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be traced for inputs (batch, {', '.join(map(str, input_shape))}) "
            f"with a batch of any size: {first_line}"
        ) from error
