"""Applies the recipe that turns a built model into the one that runs on the mesh.

A training job applies it, and a compile check applies the same function to the model that it certifies. The steps:

1. tensor parallelism and the pipeline cut, inside ``service.models.build``;
2. ``apply_float8``: the matrix products of linear layers in float8;
3. ``apply_activation_checkpoint``: recomputation, block by block;
4. ``apply_fsdp``: FSDP2, unit by unit and then what remains;
5. ``apply_compile``: ``torch.compile``, unit by unit, so that FSDP's hooks stay outside the graphs. The compile check
   leaves this step to its ladder, which calls the same function with one mode after the other.

The recipe is also what a compile report holds for: its :func:`fingerprint` is shared by the job that writes a gate and
the job that obeys it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from service.jobs.plugins import ObjectiveConfig
from service.jobs.plugins.catalogue import HOUSE
from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec, is_sharded
from service.jobs.spec.common import PARALLEL_DIMENSIONS, ParallelSpec
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.families.packaged import PackagedConfig
from service.jobs.spec.model import ModelConfig
from service.jobs.spec.objective import CrossEntropy
from service.jobs.spec.train import PipelineSpec, ShardingSpec, TrainSpec
from service.models.compiled import CompileMode, apply_compile
from service.models.outline import ModelOutline
from service.models.randomness import drawing_from, others
from service.parallel.fsdp import Precision, apply_fsdp, is_static
from service.parallel.mesh import Mesh
from service.parallel.tensor.float8 import Float8Error, apply_float8
from service.parallel.tensor.placement import state_buffers
from service.torch_internals.table import internal_of
from service.torch_internals.types import SCHEMA, OpOverload

_ONE_MICRO_BATCH = ShardingSpec().resolved(1)


@dataclass(frozen=True)
class ModelRecipe:
    """The fields of a spec that decide how its model is computed.

    ``sharding`` is resolved for the number of micro-batches. ``pipeline`` is ``None`` for a model in one piece.
    """

    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    sharding: ShardingSpec = _ONE_MICRO_BATCH
    activation_checkpoint: ActivationCheckpoint = "none"
    pipeline: PipelineSpec | None = None

    @staticmethod
    def from_spec(spec: TrainSpec | CompileSpec) -> ModelRecipe:
        return ModelRecipe(
            parallel=spec.parallel,
            precision=spec.precision,
            sharding=spec.resolved_sharding,
            activation_checkpoint=spec.activation_checkpoint,
            pipeline=spec.pipeline if spec.parallel.pp > 1 else None,
        )

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 manages the model."""
        return is_sharded(self.parallel, self.precision)

    def exact(self) -> ModelRecipe:
        """Return the recipe without mixed precision and float8, for a float64 reference."""
        return replace(self, precision=PrecisionSpec())


def parallelize(
    model: nn.Module,
    recipe: ModelRecipe,
    mesh: Mesh,
    *,
    units: Iterable[nn.Module] | None = None,
    compile_mode: CompileMode | None = None,
) -> None:
    """Apply ``recipe`` in place to ``model``, a whole model or a pipeline stage, on its device.

    ``units`` are the modules that the forward calls as a whole, which FSDP gathers one by one; the blocks when absent.
    Without ``compile_mode`` nothing is compiled.
    """
    if recipe.precision.float8 and not apply_float8(model) and recipe.pipeline is None:
        raise Float8Error("precision.float8: the blocks have no linear layer of Trivet's; expected false")
    if recipe.activation_checkpoint != "none":
        apply_activation_checkpoint(model, recipe.activation_checkpoint)
    if recipe.is_sharded:
        precision, reshard = Precision.from_spec(recipe.precision), recipe.sharding.reshard == "always"
        apply_fsdp(model, mesh, precision, reshard=reshard, units=units)
    if compile_mode is not None:
        apply_compile(model, compile_mode.backend, compile_mode.mode)


Choice = Literal["selective", "full"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT_NAMES = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "aten::convolution",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
_KEPT_NAMESPACE = "trivet::"


def apply_activation_checkpoint(model: nn.Module, choice: Choice) -> None:
    """Make each of ``model.blocks`` recompute, in place; no parameter changes its name. Blocks that
    :func:`keep_when_compiled` recompute only while they are not compiled.
    """
    for block in model.blocks.values():  # type: ignore[operator]
        # A class for all blocks of one kind, not a wrapper for each: one compiled graph then still serves all.
        kind: Any = type(block)
        contexts = _counting_once if any(state_buffers(block)) else _contexts if is_static(model) else _drawing_again
        block.__class__ = _recomputing(kind, choice, contexts)


def keep_when_compiled(model: nn.Module) -> bool:
    """Return whether a block has buffers, such as running statistics, so that it keeps its activations if compiled."""
    return any(any(state_buffers(block)) for block in model.blocks.values())  # type: ignore[operator]


@cache
def _recomputing(kind: Any, choice: Choice, contexts: Callable[[nn.Module, Choice], Contexts]) -> type[nn.Module]:
    class Recomputing(kind):  # type: ignore[misc]
        def forward(self, *inputs: Any) -> Any:
            if not torch.compiler.is_compiling():
                own = partial(contexts, self, choice)
                return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=own)
            if contexts is _counting_once:  # a graph would update the buffers twice, or read them after their update
                return super().forward(*inputs)
            # One graph serves all blocks only if none of them is in its contexts.
            if choice == "full":
                return checkpoint(super().forward, *inputs, use_reentrant=False)
            return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=_selective_contexts)

    Recomputing.__name__ = Recomputing.__qualname__ = f"Recomputing{kind.__name__}"
    return Recomputing


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    name: str = internal_of(operator, SCHEMA).name if isinstance(operator, OpOverload) else ""
    kept = name in _KEPT_NAMES or name.startswith(_KEPT_NAMESPACE)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(module: nn.Module, choice: Choice) -> Contexts:
    """Return the contexts of a forward and of its recomputation."""
    return (nullcontext(), nullcontext()) if choice == "full" else _selective_contexts()


def _drawing_again(module: nn.Module, choice: Choice) -> Contexts:
    """Return the same for a module that may draw from Python's or NumPy's generators: what is recomputed draws the
    same numbers. Torch sees to its own.
    """
    forward, again = _contexts(module, choice)
    states = others()
    return forward, _MadeAnew(lambda: _joined(drawing_from(states), again))


class _MadeAnew(AbstractContextManager[None]):
    """A context that is made anew for each recomputation: a forward that takes a gradient itself has several."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def _joined(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _selective_contexts() -> Contexts:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def _counting_once(module: nn.Module, choice: Choice) -> Contexts:
    """Return the same for a module with buffers, such as running statistics, in which a batch counts once: what is
    recomputed reads what the forward has read, and leaves no trace.
    """
    forward, again = _drawing_again(module, choice)
    read = {name: buffer.clone() for name, buffer in state_buffers(module)}
    return forward, _MadeAnew(lambda: _reading(module, read, again))


@contextmanager
def _reading(module: nn.Module, buffers: Mapping[str, Tensor], within: AbstractContextManager[Any]) -> Iterator[None]:
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in buffers]
    own = [getattr(owner, leaf) for owner, leaf in places]
    try:
        for (owner, leaf), buffer in zip(places, buffers.values(), strict=True):
            setattr(owner, leaf, buffer.clone())
        with within:
            yield
    finally:
        for (owner, leaf), buffer in zip(places, own, strict=True):
            setattr(owner, leaf, buffer)


Fingerprint = dict[str, str | int | float]


def fingerprint(
    config: ModelConfig, recipe: ModelRecipe, device: torch.device, objective: ObjectiveConfig | None = None
) -> Fingerprint:
    """Return model, objective, mesh, precision, recomputation, torch version and device architecture as flat fields for
    JSON.

    The sharding counts where FSDP manages the model, and the pipeline where the recipe has one: which stages there are
    depends on it. Another version of the package that a family is installed with, or other sources in it, is another
    model. Cross entropy is no field: it is what older reports were made with.
    """
    fields: Fingerprint = {f"model.{name}": plain(value) for name, value in config.model_dump().items()}
    fields |= {f"precision.{name}": value for name, value in recipe.precision.model_dump().items()}
    fields["activation_checkpoint"] = recipe.activation_checkpoint
    family = FAMILIES.provided[config.family]
    if family.distribution != HOUSE:
        fields["model.package"] = f"{family.distribution} {family.version}"
        fields["model.sources"] = sources_of(family.declaration.function)
    if isinstance(config, PackagedConfig):
        fields["model.package"] = f"{config.package} {config.package_version}"
    if recipe.is_sharded:
        fields |= {"sharding.reshard": recipe.sharding.reshard, "sharding.reduce": recipe.sharding.reduce}
    if recipe.pipeline is not None:
        fields["pipeline.schedule"] = recipe.pipeline.schedule
        fields["pipeline.virtual_stages"] = recipe.pipeline.stages_per_rank
    if objective not in (None, CrossEntropy()):
        fields |= {f"objective.{name}": plain(value) for name, value in objective.model_dump(mode="json").items()}
    return fields | environment(recipe.parallel, device)


def gate_fingerprints(
    outline: ModelOutline, recipe: ModelRecipe, objective: ObjectiveConfig, device: torch.device
) -> list[Fingerprint]:
    """Return the fingerprints of the gates that a job accepts: of its model in one piece and, with a pipeline, of its
    very stages.

    A pipeline whose model is compiled block by block has the graphs of the model in one piece.
    """
    whole = replace(recipe, pipeline=None)
    if recipe.pipeline is not None and (outline.blocks_alike or recipe.is_sharded):
        whole = replace(whole, parallel=recipe.parallel.model_copy(update={"pp": 1}))
    recipes = [whole] if recipe.pipeline is None else [whole, recipe]
    return [fingerprint(outline.config, recipe, device, objective) for recipe in recipes]


def environment(parallel: ParallelSpec, device: torch.device) -> Fingerprint:
    """Return mesh, torch version and device architecture, which belong to every fingerprint."""
    fields: Fingerprint = {f"parallel.{name}": getattr(parallel, name) for name in PARALLEL_DIMENSIONS}
    return fields | {"torch": torch.__version__, "device": device.type, "architecture": _architecture(device)}


def sources_of(function: str) -> str:
    """Return a digest of the Python files of the package of a declared ``module:name``: they may change while its
    version stays.
    """
    package = import_module(function.partition(":")[0].partition(".")[0])
    roots = [*getattr(package, "__path__", [])] or [package.__file__ or os.devnull]
    digest = hashlib.sha256()
    for root in map(Path, roots):
        for file in sorted(root.rglob("*.py")) or [root]:
            with suppress(OSError):  # an editor's file that leads nowhere is no source
                digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _architecture(device: torch.device) -> str:
    """Return the facts that generated code depends on: ``sm_90 NVIDIA H200`` for a GPU, ``x86_64`` for a CPU."""
    if device.type != "cuda":
        return platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor} {torch.cuda.get_device_name(device)}"


def plain(value: object) -> str | int | float:
    """Return a value of a spec as a fingerprint writes it."""
    if isinstance(value, str | int | float):
        return value
    return "default" if value is None else json.dumps(value)
