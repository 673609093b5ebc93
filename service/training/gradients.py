"""Sums the gradients of tied parameters, clips the norm over the mesh, and refuses numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.parallel import collectives
from service.parallel.distributed import rank_and_size
from service.parallel.fsdp import is_static
from service.parallel.mesh import Mesh
from service.parallel.tensor.placement import local
from service.torch_internals.table import internal


def squared_norm(gradients: Sequence[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Return this rank's contribution to the squared L2 norm, a float64 scalar.

    ``ranks`` is how many ranks hold the stage that the gradients belong to. An element that several of them hold
    counts for its share in each, so that the sum of the contributions over all ranks is the norm of the whole model.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(internal("torch._foreach_norm")([local(gradient) for gradient in gradients]))
    shares = torch.tensor([_shards(gradient) / ranks for gradient in gradients], dtype=torch.float64)
    return norms.double().square() @ shares.to(device, non_blocking=True)


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale the gradients in place so that ``norm``, their global one, is at most ``limit``; waits for no device."""
    if gradients:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype.to_real())
        internal("torch._foreach_mul_")([local(gradient) for gradient in gradients], scale)


def present(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _shards(tensor: Tensor) -> int:
    """Return the number of parts into which the ranks cut ``tensor``."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


class NonFiniteError(RuntimeError):
    """The loss, the gradient, the weights or an evaluation is not finite: further training is pointless.

    :meth:`service.training.loop.Loop.advising` adds what the user can do.
    """


@contextmanager
def explained_overflow(step: int, rate: float) -> Iterator[None]:
    """Raise :class:`NonFiniteError` for an update whose factors overflow; on a CPU, torch raises an obscure error of
    its own.
    """
    try:
        yield
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        raise NonFiniteError(f"the update of step {step} is beyond float32 with a learning rate of {rate:g}") from error


@torch.no_grad()
def check_weights(parameters: Sequence[Tensor], step: int, device: torch.device) -> None:
    """Raise :class:`NonFiniteError` on every rank if the weights of one are not finite after ``step``; all call it."""
    parts = (local(parameter.detach()) for parameter in parameters)
    own = [part for part in parts if part.numel() and (part.is_floating_point() or part.is_complex())]
    largest = torch.stack(internal("torch._foreach_norm")(own, math.inf)) if own else torch.zeros(1, device=device)
    rank, world = rank_and_size()
    broken = torch.zeros(world, device=device)
    broken[rank] = (~largest.isfinite()).any()
    if world > 1:
        dist.all_reduce(broken)
    if ranks := broken.nonzero().flatten().tolist():
        raise NonFiniteError(f"the weights are not finite on rank {ranks[0]} after the update of step {step}")


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient, which is made where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


@dataclass(frozen=True)
class TiedStages:
    """Holds this rank's tied parameters: ``originals`` on the first stage, ``copies`` on the last, in the same order.

    Each is empty on ranks without that stage. ``group`` spans the ranks of both stages; it is empty if they are one.
    A model that ``is_static`` uses all of them in each step.
    """

    originals: tuple[nn.Parameter, ...] = ()
    copies: tuple[nn.Parameter, ...] = ()
    group: str = ""
    is_static: bool = False

    @classmethod
    def between(
        cls, stages: Mapping[int, nn.Module], tied: Mapping[str, str], owners: Sequence[int], mesh: Mesh
    ) -> TiedStages:
        """Return those among this rank's ``stages`` of a pipeline whose stage s belongs to pipeline rank ``owners[s]``.
        ``tied`` names the copy of each by the original's.

        Every rank of the job calls it, since it may make a group.
        """
        if not tied or len(owners) == 1:
            return cls()
        first, last = stages.get(0), stages.get(len(owners) - 1)
        return cls(
            originals=() if first is None else tuple(map(first.get_parameter, tied.values())),
            copies=() if last is None else tuple(map(last.get_parameter, tied)),
            group=mesh.group_of_stages(owners[0], owners[-1]),
            is_static=all(map(is_static, stages.values())),
        )

    def sum_gradients(self) -> None:
        """Give original and copy the sum of their gradients; the ranks of both stages call it together."""
        if self.group:
            parameters = (*self.originals, *self.copies)
            for parameter, is_used in zip(parameters, self._used_by_any(parameters), strict=True):
                if is_used:
                    dist.all_reduce(_gradient_or_zeros(parameter), group=collectives.resolve(self.group))
            return
        for original, copy in zip(self.originals, self.copies, strict=True):
            if original.grad is not None or copy.grad is not None:
                own, other = _gradient_or_zeros(original), _gradient_or_zeros(copy)
                other.copy_(own.add_(other))

    def _used_by_any(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return whether a rank of the group has a gradient of each; without a collective if models are static."""
        used = [parameter.grad is not None for parameter in parameters]
        if self.is_static or not used:
            return used
        flags = torch.tensor(used, dtype=torch.int32).to(parameters[0].device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=collectives.resolve(self.group))
        return [bool(flag) for flag in flags.tolist()]

    @torch.no_grad()
    def take_up(self, moments: Callable[[nn.Parameter], Mapping[str, Tensor]]) -> None:
        """Copy loaded originals and their ``moments`` into copies of a rank with both: only originals are loaded."""
        if self.group:
            return
        for original, copy in zip(self.originals, self.copies, strict=True):
            local(copy.detach()).copy_(local(original.detach()))
            for name, value in moments(copy).items():
                local(value).copy_(local(moments(original)[name]))
