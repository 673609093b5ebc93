"""From a built model to one that trains on the mesh, in a fixed order.

1. tensor parallelism and the pipeline cut: inside ``service.models.build``
2. activation checkpointing, per block
3. FSDP2, per block and then the rest
4. ``torch.compile``, per FSDP block: hooks stay outside the graphs
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from service.jobs.spec.train import TrainSpec
from service.models.compiled import compile_in_place
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.mesh import Mesh
from service.training.gate import BACKENDS, Phase


def parallelize(model: nn.Module, spec: TrainSpec, mesh: Mesh, backends: Mapping[Phase, str]) -> None:
    """Apply to ``model``, in place, what the spec asks for and the mesh needs."""
    if spec.activation_checkpoint == "full":
        apply_activation_checkpoint(model)
    precision = Precision.from_spec(spec.precision)
    if mesh.dp.size > 1 or precision != Precision():
        # Gathered parameters are kept between micro-batches, and freed between blocks when there is only one.
        apply_fsdp(model, mesh, precision, reshard=spec.micro_batches == 1)
    if backends:
        apply_compile(model, backends)


def apply_activation_checkpoint(model: nn.Module) -> None:
    """Recompute each block's activations in the backward pass, keeping only its input (Chen et al., 2016).

    The block's own ``forward`` is replaced, so no parameter changes its name.
    """
    for block in model.blocks.values():  # type: ignore[operator]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def apply_compile(model: nn.Module, backends: Mapping[Phase, str]) -> None:
    """Compile with the lower of the allowed rungs: a rung that passed has passed after all those below it."""
    compile_in_place(model, min(backends.values(), key=BACKENDS.index))
