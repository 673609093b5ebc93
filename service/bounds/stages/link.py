"""A rank's place among the pipeline stages, messages along the line, and the model over all stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from service.parallel.mesh import Mesh
from service.parallel.pipeline.tags import Direction, Message
from service.parallel.pipeline.transport import Transport, connect


class StageLink:
    """Messages to the stages beside this one.

    Tensors of any shape and type; both sides must call for the same message. A message has been sent when ``to_…``
    returns.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Every rank of the job makes one at the same point."""
        owners = tuple(range(mesh.pp.size))
        self.rank, self.size, self.device = mesh.pp.rank, mesh.pp.size, device
        self._transport = Transport(mesh.pp.rank, owners, connect(mesh, owners), device)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageLink:
        return self

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def to_next(self, tensor: Tensor) -> None:
        self._send(Message(self.rank, 0, Direction.ACTIVATION), tensor)

    def from_previous(self) -> Tensor:
        return self._receive(Message(self.rank - 1, 0, Direction.ACTIVATION))

    def to_previous(self, tensor: Tensor) -> None:
        self._send(Message(self.rank - 1, 0, Direction.GRADIENT), tensor)

    def from_next(self) -> Tensor:
        return self._receive(Message(self.rank, 0, Direction.GRADIENT))

    def of_last(self, tensor: Tensor | None) -> Tensor:
        """Return the last stage's tensor on every stage, each of which calls it; others' are not looked at."""
        tensor = self._own(tensor) if self.is_last else self.from_next()
        if not self.is_first:
            self.to_previous(tensor)
        return tensor

    def of_first(self, tensor: Tensor | None) -> Tensor:
        """Return the first stage's tensor on every stage, each of which calls it; others' are not looked at."""
        tensor = self._own(tensor) if self.is_first else self.from_previous()
        if not self.is_last:
            self.to_next(tensor)
        return tensor

    def _own(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor.to(self.device)

    def joined(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the stages' tensors side by side, on every stage."""
        tensor = tensor.to(self.device)
        if not self.is_first:
            tensor = torch.cat([self.from_previous(), tensor], dim=dim)
        if not self.is_last:
            self.to_next(tensor)
        return self.of_last(tensor)

    def _send(self, message: Message, tensor: Tensor) -> None:
        self._transport.begin_unknown()
        self._transport.send(message, tensor.detach().to(self.device))
        self._transport.finish()

    def _receive(self, message: Message) -> Tensor:
        self._transport.begin_unknown()
        return self._transport.wait(self._transport.receive(message))


class InStages(nn.Module):
    """The model of which each rank of ``line`` has a stage.

    Every rank calls it with a batch of the model's inputs and gets the model's outputs. All ranks ask for the inputs'
    gradient at the same point, with the same gradient of the outputs.
    """

    def __init__(self, stage: nn.Module, line: StageLink) -> None:
        super().__init__()
        self.stage, self.line = stage, line

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            found: Tensor = _Across.apply(x, self)  # type: ignore[no-untyped-call]
            return found
        return self.passed_on(self.entering(x))[1]

    def entering(self, x: Tensor) -> Tensor:
        """Return the stage's own input."""
        return x if self.line.is_first else self.line.from_previous()

    def passed_on(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stage's output, and that of the last."""
        y: Tensor = self.stage(own)
        if not self.line.is_last:
            self.line.to_next(y)
        return y, self.line.of_last(y)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: InStages) -> Tensor:
        ctx.line = model.line
        with torch.enable_grad():
            ctx.own = model.entering(x).detach().requires_grad_()
            ctx.end, outputs = model.passed_on(ctx.own)
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        line: StageLink = ctx.line
        if not line.is_last:
            gradient = line.from_next()
        (own,) = torch.autograd.grad(ctx.end, ctx.own, gradient)
        if not line.is_first:
            line.to_previous(own)
        return line.of_first(own), None
