"""Tell who is reading the code that runs: Dynamo, an exporter or the interpreter."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing, which wants plain operators; ``torch.compile`` wants the fastest
    ones.

    Dynamo of torch 2.11 takes ``torch.compiler.is_exporting`` for true when it compiles, too. Export does not go
    through Dynamo (``strict=False``, its default), so the second question tells the two apart.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
