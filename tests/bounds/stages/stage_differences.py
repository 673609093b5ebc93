"""Bounds over pipeline stages against those of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def compare_bounds(
    staged: Any, whole: Any, box: Any, options: Any, methods: Iterable[str], *, at_once: int = 2**10
) -> dict[str, float]:
    """By method, the sum of the bounds, which all ranks have in common. Where there is a ``whole`` network, also their
    difference from its bounds, and the width of these.
    """
    import torch
    from nets import output_bounds

    from service.bounds.methods import METHODS

    identity = torch.eye(staged.outputs, dtype=box.lower.dtype)
    rows, found = torch.cat([identity, -identity]).unsqueeze(0), {}
    for name in methods:
        with torch.no_grad():
            analysis = staged.method(METHODS[name])(staged.network, box, options)
            bounds = torch.cat([analysis.lower_bounds(part) for part in rows.split(at_once, dim=1)], dim=1)
        found[f"sum of {name}"] = float(bounds.sum())
        if whole is not None:
            right = output_bounds(whole, box, name, options)
            expected = torch.cat([right.lower, -right.upper], dim=1)
            found[name] = float((bounds - expected).abs().max() / expected.abs().max())
            found[f"width of {name}"] = float(right.width.mean())
    return found
