"""Provides the client's calls that take a live module: it is exported here, and only its graph and tensors leave.

torch is imported by these calls alone; the rest of the client works without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from service.jobs.records import Job, StoredFile
from trivet.errors import JobFailed, ModuleRefused, TrivetError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

_PHASES = ("train", "inference")
_OUTSIDE = 1e-3
"""How far the module's own output may lie outside of its bounds, relative to its size: rounding, and no more."""


@dataclass(frozen=True)
class Verified:
    """Certified bounds of a module's output on a box, in the output's shape, and the verdict about conditions.

    ``counterexample`` has the entries of the inputs, one input after the other, where a condition is violated.
    """

    job: Job = field(repr=False)
    verdict: str
    lower: np.ndarray
    upper: np.ndarray
    margin: float | None
    counterexample: np.ndarray | None
    reason: str | None


@dataclass(frozen=True)
class CompileChecked:
    """What a compile check found: sentences, the highest safe mode of each phase (``None``: none), the whole report."""

    job: Job = field(repr=False)
    summary: list[str]
    gate: Mapping[str, str | None]
    report: Mapping[str, Any] = field(repr=False)


class ModuleCalls:
    """Calls of a :class:`trivet.Client` about a live ``nn.Module``."""

    def verify(
        self,
        /,
        module: nn.Module,
        box: tuple[Any, Any],
        *,
        conditions: Sequence[tuple[Sequence[float], float]] = (),
        project: str | None = None,
        wait_s: float | None = None,
        **fields: Any,
    ) -> Verified:
        """Bound a module's output on a box of inputs, as a job, and wait for it.

        ``box`` is ``(lower, upper)``, each an array in the shape of the input with a first dimension of 1, or a tuple
        of arrays for several inputs; arrays of integers are inputs of whole numbers. ``conditions`` are pairs
        ``(coefficients, threshold)``: ``coefficients · output ≥ threshold`` is to hold. ``fields`` are further fields
        of a verification's spec, as ``method`` and ``budget``.

        Raises :class:`ModuleRefused` for a module that cannot be exported, :class:`JobFailed` for a job that failed,
        ``TimeoutError`` after ``wait_s`` seconds.
        """
        from trivet.exporting import write_onnx  # noqa: PLC0415 - brings every spec, which other calls do not need

        client: Any = self
        ends = _BoxInputs.of(module, box)
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{type(module).__name__}.onnx")
            write_onnx(module, ends.lower, path)
            file: StoredFile = client.upload(path, project=project)
        halves = [{"coefficients": list(weights), "threshold": threshold} for weights, threshold in conditions]
        asked = {"box": {"lower": ends.numbers[0], "upper": ends.numbers[1], "output": halves}}
        about = {"kind": "verify", "name": type(module).__name__, "model": {"onnx": file.id}, "property": asked}
        job = _succeeded(client.wait(client.submit(about | fields, project=project).id, timeout_s=wait_s))
        found = _verified(job, next(iter(client.bounds(job.id))), ends.shape)
        ends.check_inside(module, found)
        return found

    def compile_check(
        self,
        /,
        module: nn.Module,
        example: Tensor | tuple[Tensor, ...],
        *,
        phases: Sequence[str] = _PHASES,
        project: str | None = None,
        wait_s: float | None = None,
        **fields: Any,
    ) -> CompileChecked:
        """Check, as a job, which modes of ``torch.compile`` are safe for a module at an example, and wait for it.

        The module is exported once as ``module.train()`` and once as ``module.eval()`` would run, and left as it is.
        What is checked is its graph: Python around it, such as a cache in an attribute, is not. ``fields`` are further
        fields of a compile check's spec, as ``modes`` and ``steps``.

        Raises what :meth:`verify` raises.
        """
        from trivet.exporting import write_exported  # noqa: PLC0415 - as above

        client: Any = self
        inputs = example if isinstance(example, tuple) else (example,)
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{type(module).__name__}.safetensors")
            write_exported(module, inputs, phases, path)
            file: StoredFile = client.upload(path, project=project)
        program = {"name": "exported", "file": file.id}
        about = {"kind": "compile", "name": type(module).__name__, "program": program, "phases": list(phases)}
        job = _succeeded(client.wait(client.submit(about | fields, project=project).id, timeout_s=wait_s))
        report = client.report(job.id)
        gate = {phase: report["gate"].get(phase) for phase in phases}
        return CompileChecked(job, list(report["summary"]), gate, report)


def _succeeded(job: Job) -> Job:
    if job.state != "succeeded":
        raise JobFailed(job)
    return job


@dataclass(frozen=True)
class _BoxInputs:
    """The two ends of a box as inputs of the module, their numbers in float64, and the shape of its output."""

    lower: tuple[Tensor, ...]
    upper: tuple[Tensor, ...]
    numbers: tuple[list[float], list[float]]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module, box: tuple[Any, Any]) -> _BoxInputs:
        import torch  # noqa: PLC0415 - only these calls need it

        from trivet.exporting import arithmetic, check_mode  # noqa: PLC0415 - as above

        check_mode(module)
        dtype, device = arithmetic(module, (torch.float32, torch.float64))
        sides = [[_array(each) for each in (end if isinstance(end, tuple) else (end,))] for end in box]
        shapes = [[tuple(each.shape) for each in side] for side in sides]
        if len(sides) != 2 or shapes[0] != shapes[1]:
            raise ValueError(f"box: the ends have the shapes {shapes}; expected (lower, upper) of the same shapes")
        if any(shape[:1] != (1,) for shape in shapes[0]):
            raise ValueError(f"box: the inputs have the shapes {shapes[0]}; expected a first dimension of 1: one input")
        numbers = [[number for each in side for number in each.double().flatten().tolist()] for side in sides]
        lower, upper = (
            tuple(each.to(device, dtype if each.is_floating_point() else None) for each in side) for side in sides
        )
        try:
            with torch.no_grad():
                output = module(*lower)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"box: {type(module).__name__} does not take inputs of the shapes {shapes[0]}: {error}"
            ) from error
        if not isinstance(output, torch.Tensor):
            raise ModuleRefused(
                f"{type(module).__name__} returns a {type(output).__name__}; expected one tensor: bound a module that "
                "returns the one that is meant"
            )
        return cls(lower, upper, (numbers[0], numbers[1]), tuple(output.shape))

    def check_inside(self, module: nn.Module, found: Verified) -> None:
        """Raise ``RuntimeError`` if the live module gives, at an end or in the middle, what its bounds exclude."""
        import torch  # noqa: PLC0415 - as above

        middle = tuple(
            low + (high - low) / 2 if low.is_floating_point() else low
            for low, high in zip(self.lower, self.upper, strict=True)
        )
        for inputs in (self.lower, middle, self.upper):
            with torch.no_grad():
                values = module(*inputs).detach().double().cpu().flatten().tolist()
            for index, value in enumerate(values):
                low, high = float(found.lower.flat[index]), float(found.upper.flat[index])
                room = _OUTSIDE * (1 + abs(value))
                if not (low - room <= value <= high + room):
                    raise RuntimeError(
                        f"output {index} of the live module is {value}, outside of its bounds [{low}, {high}] in job "
                        f"{found.job.id}: its export differs from it, or Trivet is wrong; please report it"
                    )


def _array(value: Any) -> Tensor:
    """Return numbers as a tensor: lists in float64, arrays and tensors in their own type."""
    import numpy as np  # noqa: PLC0415 - as torch
    import torch  # noqa: PLC0415 - as above

    if isinstance(value, torch.Tensor | np.ndarray):
        return torch.as_tensor(value).detach()
    return torch.tensor(value, dtype=torch.float64)


def _verified(job: Job, row: Mapping[str, Any], shape: tuple[int, ...]) -> Verified:
    import numpy as np  # noqa: PLC0415 - as above

    if not row["lower"]:
        raise TrivetError(f"job {job.id} could not bound the module: {row['reason']}")
    lower, upper = (np.array([float(value) for value in row[end]]).reshape(shape) for end in ("lower", "upper"))
    witness = row.get("counterexample")
    found = None if witness is None else np.array(witness, dtype=np.float64)
    return Verified(job, row["verdict"], lower, upper, row["margin"], found, row.get("reason"))
