"""Defines how a model is compiled: one function, which the compile check judges and a training job applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule

from service.torch_internals.table import internal, internal_of, set_internal

_APART = {"triton.cudagraph_unexpected_rerecord_limit": 127}
"""One below the default: caches distinguish a compilation's options, but not which of its inputs must stay in place."""


def copying_inductor(graph: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None) -> Callable[..., Any]:
    """Compile with Inductor, as a backend of ``torch.compile``, for modules whose parameters move.

    CUDA graphs assume that parameters, and the inputs that a forward saves, stay in place, and record again if they
    move: under FSDP2 in every step. Here each replay first copies them into the graph's memory, like other inputs;
    graphs share that memory, so sharding saves as much as without graphs.
    """
    options = {**(internal("torch._inductor.list_mode_options")(mode) if mode else {}), **_APART}
    compile_fx = internal("torch._inductor.compile_fx.compile_fx")
    compiled: Any = compile_fx(graph, inputs, inner_compile=_copying, config_patches=options)
    return compiled  # type: ignore[no-any-return]


def _reset() -> None:
    """Forget all CUDA graphs, as ``torch._dynamo.reset`` does for Inductor itself."""
    internal("torch._inductor.cudagraph_trees.reset_cudagraph_trees")()


copying_inductor.reset = _reset  # type: ignore[attr-defined]


def _copying(
    graph: fx.GraphModule, inputs: Sequence[Any], *, static_input_idxs: Sequence[int] = (), **options: Any
) -> Any:
    """Compile one graph, forward or backward. Inputs that it updates are not copied."""
    places = graph.graph.find_nodes(op="placeholder")
    written = {node.args[0] for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    kept = [index for index in static_input_idxs if places[index] in written]
    return internal("torch._inductor.compile_fx.compile_fx_inner")(graph, inputs, static_input_idxs=kept, **options)


@dataclass(frozen=True)
class CompileMode:
    """Holds the arguments of ``torch.compile``. With ``cuda_graphs`` it captures them, so steps must be marked."""

    backend: str | Callable[..., Any]
    mode: str | None = None
    cuda_graphs: bool = False


_REDUCE_OVERHEAD = "reduce-overhead"
COMPILE_MODES: Mapping[str, CompileMode] = MappingProxyType(
    {
        "eager": CompileMode("eager"),
        "aot_eager": CompileMode("aot_eager"),
        "aot_eager_decomp_partition": CompileMode("aot_eager_decomp_partition"),
        "inductor": CompileMode("inductor"),
        _REDUCE_OVERHEAD: CompileMode("inductor", _REDUCE_OVERHEAD, cuda_graphs=True),
    }
)
"""Compile modes by their names in gates and specs, from the one that compiles least to the one that does most."""


COMPILE_CACHE = "compile_cache"
"""The folder of compiled code among a compile job's artifacts."""


_SAVE = "torch._inductor.runtime.autotune_cache.AutotuneCache.save"


def load_portable(cache: bytes) -> bool:
    """Load code that another process compiled; false if it is damaged.

    Its kernels know the folder in which they were compiled. One that is tuned here notes the outcome there, and on a
    GPU most are; the folder of a job that has ended is gone, and without the note a kernel is only tuned once more.
    """
    save = internal(_SAVE)
    if not hasattr(save, "__wrapped__"):
        set_internal(_SAVE, _if_it_can(save))
    return torch.compiler.load_cache_artifacts(cache) is not None


def _if_it_can(save: Callable[..., None]) -> Callable[..., None]:
    @wraps(save)
    def saved(*arguments: Any, **named: Any) -> None:
        with suppress(OSError):
            save(*arguments, **named)

    return saved


def cache_file(phase: str, name: str, rank: int) -> str:
    """Return the name of the file in which a rank keeps its code of a phase in the mode ``name``."""
    return f"{phase}-{name}-{rank}.bin"


def apply_compile(
    module: nn.Module, backend: str | Callable[..., Any], mode: str | None = None
) -> tuple[nn.Module, ...]:
    """Compile ``module`` in place with ``backend`` in ``mode``; names of parameters do not change.

    Compilation itself happens at the first calls. Returns the compiled modules.
    """
    units = compile_units(module)
    for unit in units:
        compile_unit(unit, backend, mode)
    return units


def compile_unit(unit: nn.Module, backend: str | Callable[..., Any], mode: str | None = None) -> None:
    """Compile this module in place, as a whole; under FSDP2, CUDA graphs must cope with parameters that move."""
    sharded = isinstance(unit, FSDPModule)
    if sharded and (backend, mode) == ("inductor", _REDUCE_OVERHEAD):
        backend = copying_inductor
    if not _is_skipped(unit):
        unit.compile(backend=backend, mode=mode)
        return
    call: Callable[..., Any] = internal_of(unit, "torch.nn.Module._call_impl")
    if sharded:  # its hooks gather parameters, outside of any graph
        unit.forward = torch.compile(_within_a_frame(unit.forward), backend=backend, mode=mode)
        unit._compiled_call_impl = call
    else:
        unit._compiled_call_impl = torch.compile(_within_a_frame(call), backend=backend, mode=mode)


def _is_skipped(unit: nn.Module) -> bool:
    """Return whether Dynamo would compile no frame of this module's call, as for a bare ``Sequential``: it skips the
    files of ``torch.nn`` itself.
    """
    skips = internal("torch._dynamo.trace_rules.check")  # brings Dynamo, which only what compiles needs
    return bool(skips(unit.forward))


def _within_a_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's call within a frame that Dynamo compiles, as ``torch.compile(module)`` has one.

    Its code is a copy: all modules that share code also share its limit of recompilations.
    """

    def framed(*arguments: Any, **named: Any) -> Any:
        return call(*arguments, **named)

    framed.__code__ = framed.__code__.replace()
    return framed


def as_compiled(
    function: Callable[..., Any], backend: str | Callable[..., Any], mode: str | None = None
) -> Callable[..., Any]:
    """Return a compiled form of ``function``, which itself does not change."""
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, mode=mode)
    return compiled


def compile_units(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules that ``apply_compile`` compiles.

    Under FSDP2 each innermost sharded block by itself, so that the hooks which gather and reshard parameters stay
    outside the graphs: Dynamo never traces them. Blocks of a model that says ``blocks_alike`` too: one graph
    then serves all of them. Any other module is compiled whole.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    innermost = [
        part
        for part in sharded
        if not any(isinstance(child, FSDPModule) for child in part.modules() if child is not part)
    ]
    if innermost:
        return tuple(innermost)
    blocks = getattr(module, "blocks", None)
    if getattr(module, "blocks_alike", False) and isinstance(blocks, nn.ModuleDict) and len(blocks) > 0:
        return tuple(blocks.values())
    return (module,)
