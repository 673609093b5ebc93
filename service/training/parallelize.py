"""From a built model to one that trains on the mesh, in a fixed order.

1. tensor parallelism and the pipeline cut: inside ``service.models.build``
2. float8 products, where the spec asks for them
3. activation checkpointing, per block
4. FSDP2, per block and then the rest
5. ``torch.compile``, per block: hooks stay outside the graphs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from service.jobs.spec.train import TrainSpec
from service.models.compiled import RECIPES, compile_in_place
from service.models.recompute import apply_activation_checkpoint
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.mesh import Mesh
from service.parallel.tensor.float8 import use_float8
from service.training.gate import Phase, lowest


def parallelize(
    model: nn.Module, spec: TrainSpec, mesh: Mesh, modes: Mapping[Phase, str], units: Iterable[nn.Module]
) -> None:
    """Apply to ``model``, in place, what the spec asks for and the mesh needs; ``units`` are sharded one by one."""
    if spec.precision.float8:
        use_float8(model)
    if spec.activation_checkpoint != "none":
        apply_activation_checkpoint(model, spec.activation_checkpoint)
    if is_sharded(spec):
        apply_fsdp(model, mesh, Precision.from_spec(spec.precision), reshard=spec.reshards, units=units)
    if modes:
        apply_compile(model, modes)


def is_sharded(spec: TrainSpec) -> bool:
    """Whether FSDP2 manages the model: to share it among ranks, or because it is what casts parameters."""
    return spec.parallel.dp > 1 or Precision.from_spec(spec.precision) != Precision()


def apply_compile(model: nn.Module, modes: Mapping[Phase, str]) -> None:
    """Compile in the lowest of the allowed modes."""
    recipe = RECIPES[lowest(modes)]
    compile_in_place(model, recipe.backend, recipe.mode)
