"""Steps of gradient descent within the unit box."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from service.bounds.fused.building import kernels_for
from service.torch_internals.table import internal


class Adam:
    """Adam (Kingma and Ba, 2015; its usual constants) on ``parameters``, which stay between 0 and 1.

    They are of one type. A NaN in a gradient counts as 0. The rate is multiplied by ``decay`` after each step.
    All state is in tensors that stay in place, so that a recorded step replays. The update is written in three
    places that differ in rounding or more, so that no schedule serves two of them: here from powers of tensors;
    in :mod:`.kernels.steps` from exponentials, since one kernel reads everything from the device; and for
    multipliers (in :mod:`service.verification.bab.activations.recorded_optimisation`) from a table
    made in float64, decayed before the first step too, with ε added before the second moment's bias is corrected.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float, decay: float) -> None:
        self.parameters = list(parameters)
        self.rate, self.decay = rate, decay
        self.means = [torch.zeros_like(each) for each in self.parameters]
        self.squares = [torch.zeros_like(each) for each in self.parameters]
        like = self.parameters[0]
        self.steps = like.new_zeros(()).detach()
        # Filled, not copied, so that a record that begins with this reads nothing from the host.
        self.pace = torch.stack([torch.full_like(self.steps, each) for each in (rate, math.log(decay))])

    @torch.no_grad()
    def restart(self) -> None:
        internal("torch._foreach_zero_")([*self.means, *self.squares, self.steps])

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters by their gradients."""
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            if parameter.grad is not None:
                self._move(parameter, parameter.grad, mean, square)
        self.steps += 1

    def _move(self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        kernels = kernels_for(parameter, gradient)
        if kernels is None or not parameter.is_contiguous():
            self._move_in_steps(parameter, gradient, mean, square)
            return
        count = parameter.numel()
        kernels.adam[(-(-count // BLOCK),)](
            parameter, gradient.contiguous(), mean, square, self.steps, self.pace, count, BLOCK=BLOCK
        )

    def _move_in_steps(self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        gradient = gradient.nan_to_num(0, 0, 0)
        mean.lerp_(gradient, 1 - FIRST)
        square.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
        step = self.steps + 1
        speed = self.rate * self.decay**self.steps / (1 - FIRST**step)
        size = (square / (1 - SECOND**step)).sqrt_().add_(EPSILON)
        parameter.sub_(mean / size * speed).clamp_(0, 1)


FIRST, SECOND, EPSILON = 0.9, 0.999, 1e-8
BLOCK = 1024
