"""Activation checkpointing: what a block's backward pass computes again instead of keeping (Chen et al., 2016).

``full`` keeps a block's input alone. ``selective`` also keeps what is dear to compute, the results of matrix products,
of attention and of collectives, and repeats the elementwise rest. A compiled block does that by itself whatever is
asked for; there, ``selective`` lets the compiler also repeat the products that free the most memory for their work,
until ``COMPILED_BUDGET`` of the activations is left.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Choice = Literal["selective", "full"]

COMPILED_BUDGET = 0.7

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
    """Make each of ``model.blocks`` recompute, in place; no parameter changes its name."""
    if choice == "selective":
        # Read when a graph is first compiled. A process runs one model, so setting it here affects nothing else.
        functorch_config.activation_memory_budget = COMPILED_BUDGET
    for block in model.blocks.values():  # type: ignore[operator]
        # A class for all blocks of one kind, not a wrapper for each: one compiled graph then still serves all.
        kind: Any = type(block)
        block.__class__ = _recomputing(kind, choice)


@cache
def _recomputing(kind: Any, choice: Choice) -> type[nn.Module]:
    class Recomputing(kind):  # type: ignore[misc]
        def forward(self, *inputs: Any) -> Any:
            if choice == "full":
                return checkpoint(super().forward, *inputs, use_reentrant=False)
            if torch.compiler.is_compiling():  # the compiler chooses, within its budget
                return super().forward(*inputs)
            return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=_selective_contexts)

    Recomputing.__name__ = Recomputing.__qualname__ = f"Recomputing{kind.__name__}"
    return Recomputing


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    name: str = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else ""
    kept = name in _KEPT_NAMES or name.startswith(_KEPT_NAMESPACE)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = partial(create_selective_checkpoint_contexts, _policy)
