"""Names the tensors of a run for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from service.parallel.tensor.placement import global_parameters, global_rows

MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _named_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank's stages under their global names.

    Of a tied parameter whose two copies are both here, only the first is given.
    """
    known: set[str] = set()
    for module in modules:
        for name, parameter in global_parameters(module):
            if name not in known:
                known.add(name)
                yield name, parameter


def model_tensors(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    return {f"{MODEL_PREFIX}{name}": parameter.detach() for name, parameter in _named_parameters(modules)}


def training_tensors(modules: Iterable[nn.Module], optimizer: AdamW) -> dict[str, Tensor]:
    """Return the model and AdamW moments, as views: loading into them restores the run.

    AdamW's step count isn't among them. It is the same for every parameter, so the checkpoint's step says it
    (see :func:`prime`).
    """
    modules = list(modules)
    moments = {
        f"{_OPTIMIZER_PREFIX}{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in _named_parameters(modules)
        for moment in _MOMENTS
    }
    return model_tensors(modules) | moments


def training_rows(modules: Iterable[nn.Module]) -> dict[str, int]:
    """Return, by the same names, the rows without padding of each padded tensor."""
    known = {name: rows for module in modules for name, rows in global_rows(module).items()}
    moments = {f"{_OPTIMIZER_PREFIX}{moment}.{name}": rows for name, rows in known.items() for moment in _MOMENTS}
    return {f"{MODEL_PREFIX}{name}": rows for name, rows in known.items()} | moments


def prime(optimizer: AdamW, step: int) -> None:
    """Give AdamW the state that it would have created by ``step``, so that a checkpoint can be loaded into it."""
    on_device = bool(optimizer.defaults["fused"] or optimizer.defaults["capturable"])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = torch.tensor(float(step), device=parameter.device if on_device else "cpu")
            zeros = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": count, **zeros}
