"""CUDA graphs of modules whose parameters lie elsewhere in every step, as those that FSDP2 gathers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_APART = {"triton.cudagraph_unexpected_rerecord_limit": 127}
"""One below the default: caches know the options of a compilation, not which inputs it takes to stay in their place."""


def copying_inductor(graph: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None) -> Callable[..., Any]:
    """Compile with Inductor, as a backend of ``torch.compile``, for modules whose parameters do not stay where they
    are.

    CUDA graphs take it that parameters, and what a forward saves of its inputs, stay in their place, and are recorded
    again where they do not: in every step, under FSDP2. Here each replay copies them into the graph's own memory
    first, as it does other inputs; that memory is shared between graphs, so sharding saves as much as without.
    """
    from torch._inductor import list_mode_options  # noqa: PLC0415 - brings Inductor
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415

    options = {**(list_mode_options(mode) if mode else {}), **_APART}
    compiled: Any = compile_fx(graph, inputs, inner_compile=_copying, config_patches=options)
    return compiled  # type: ignore[no-any-return]


def _reset() -> None:
    """Forget all CUDA graphs, as ``torch._dynamo.reset`` does for Inductor itself."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees  # noqa: PLC0415

    reset_cudagraph_trees()


copying_inductor.reset = _reset  # type: ignore[attr-defined]


def _copying(
    graph: fx.GraphModule, inputs: Sequence[Any], *, static_input_idxs: Sequence[int] = (), **options: Any
) -> Any:
    """Compile one graph, forward or backward. What it updates stays as it is: a copy would not do."""
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415

    places = graph.graph.find_nodes(op="placeholder")
    written = {node.args[0] for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    kept = [index for index in static_input_idxs if places[index] in written]
    return compile_fx_inner(graph, inputs, static_input_idxs=kept, **options)
