"""Writes the outputs of a program's inference: files of whole steps, from which a later attempt goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from service.jobs.files import atomic_draft
from service.models.full_weights import whole_tensor

STEPS = 100
"""The steps of a file; those of one are held in memory until it is written."""


class OutputFiles:
    """Writes ``RANK-FIRST.safetensors``, with tensors named ``STEP/NAME``, each of :data:`STEPS` steps but the last."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._held: dict[str, Tensor] = {}

    def done(self) -> int:
        """Return the steps in whole files, from the first on."""
        count = 0
        while self._path(count).is_file():
            count += STEPS
        return count

    def add(self, step: int, outputs: Mapping[str, Tensor]) -> None:
        """Take the outputs of a step, counted from 0; its file is written with its last one."""
        for name, value in outputs.items():
            self._held[f"{step}/{name}"] = whole_tensor(value).to("cpu", copy=True).contiguous()
        if (step + 1) % STEPS == 0:
            self.write(step)

    def write(self, last: int) -> None:
        """Write the steps of the file that ends with ``last``, if there are any."""
        if self._held:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_draft(self._path(last - last % STEPS)) as draft:
                save_file(self._held, draft)
        self._held = {}

    def _path(self, first: int) -> Path:
        return self.folder / f"{self._rank}-{first}.safetensors"
