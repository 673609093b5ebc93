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

from service.jobs.spec.arithmetic import is_sharded
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
    if is_sharded(spec.parallel, spec.precision):
        reshard = spec.settled_sharding.reshard == "always"
        apply_fsdp(model, mesh, Precision.from_spec(spec.precision), reshard=reshard, units=units)
    if modes:
        apply_compile(model, modes)


def apply_compile(model: nn.Module, modes: Mapping[Phase, str]) -> None:
    """Compile in the lowest of the allowed modes."""
    recipe = RECIPES[lowest(modes)]
    compile_in_place(model, recipe.backend, recipe.mode)
