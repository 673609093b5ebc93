"""Checks whether Dynamo traced into FSDP2's hooks, which gather and reshard parameters and must stay outside of
graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._dynamo import symbolic_convert

_HOOKS = "torch/distributed/fsdp/"


@contextmanager
def traced_hooks() -> Iterator[list[str]]:
    """Yield a list that gets the functions of FSDP which Dynamo inlines into a graph within, from
    ``InliningInstructionTranslator.inline_call``, which is private and the same on torch 2.11 to 2.13 in what is used
    here.
    """
    found: list[str] = []
    translator: Any = symbolic_convert.InliningInstructionTranslator
    inline = getattr(translator.inline_call, "__func__", None)
    if inline is None:  # it is no class method any more, so nothing is known
        yield found
        return

    def watched(cls: Any, parent: Any, function: Any, *arguments: Any, **keywords: Any) -> Any:
        code = getattr(function, "get_code", lambda: None)()
        if code is not None and _HOOKS in code.co_filename.replace("\\", "/"):
            found.append(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})")
        return inline(cls, parent, function, *arguments, **keywords)

    with patch.object(translator, "inline_call", classmethod(watched)):
        yield found
