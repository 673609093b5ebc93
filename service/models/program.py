"""Defines programs: modules, and a loop of one's own that runs them in steps. Jobs check, train and run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from service.jobs.files import DataLayout
from service.jobs.plugins import ParallelSpec, ProgramConfig
from service.jobs.spec.compile import Phase
from service.jobs.spec.program import PROGRAMS
from service.models.compiled import compile_units
from service.models.parallelize import Fingerprint, environment, plain, sources_of
from service.parallel.boundary import CallSite, StepBoundary
from service.parallel.mesh import Mesh


@dataclass(frozen=True)
class Parts:
    """The parts of a program, in one dtype, before anything is compiled."""

    modules: Mapping[str, nn.Module]
    compiled: tuple[str, ...]
    """The modules that are compiled; the others run as they are."""
    optimizers: tuple[Optimizer, ...] = ()
    """Each of their parameters must get a gradient and move."""
    dtype: torch.dtype = torch.float32
    kept: tuple[str, ...] = ()
    """Modules whose results are meant to outlive their step."""

    def __post_init__(self) -> None:
        strangers = [name for name in self.compiled if name not in self.modules]
        if strangers or not self.compiled:
            named = f"compiled names {strangers[0]!r}" if strangers else "nothing is to be compiled"
            raise ValueError(f"{named}; expected some of the modules {', '.join(self.modules)}")

    def units(self) -> dict[str, nn.Module]:
        """Return, by name, the units of the modules that are compiled, each as a whole."""
        units: dict[str, nn.Module] = {}
        for name in self.compiled:
            module = self.modules[name]
            names = {id(part): f"{name}.{path}" if path else name for path, part in module.named_modules()}
            units |= {names[id(unit)]: unit for unit in compile_units(module)}
        return units

    def members(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by the names of their modules, each once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for part, module in self.modules.items():
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                if id(value) not in seen:
                    seen.add(id(value))
                    found[f"{part}.{name}"] = value
        return found


@dataclass(frozen=True)
class Step:
    """Holds the results of one step, by name, to be compared with the uncompiled program's.

    ``inputs`` has each input that the step may update in place, before and after.
    """

    losses: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, named in (("losses", self.losses), ("outputs", self.outputs)):
            if not isinstance(named, Mapping):
                raise TypeError(f"{what} is a {type(named).__name__}; expected tensors by name")
            for name, value in named.items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"{what}[{name!r}] is a {type(value).__name__}; expected a tensor")


class Program(Protocol):
    """A program as a job runs it; a compile check builds it anew for every rung. Every rank of a mesh runs it.

    ``train`` and ``inference`` never end: each ``next`` runs one whole step, with its forwards, backwards and updates,
    and yields its results. A second call begins again, over the same parts. A step begins with
    ``boundary.step_boundary()`` and calls modules by ``boundary.boundary_call``; the job has compiled them in place.
    Random numbers come from the default generators, which are seeded where a step begins; what comes before the first
    step draws the same in every attempt.

    A job asks for more where a program has it: ``first`` as an argument of both, the number of steps done before;
    ``batches`` as one of ``inference``, an iterator of a source's inputs; and ``evaluate(parts, boundary)``, which
    returns numbers by name.
    """

    @property
    def device(self) -> torch.device:
        """Return where the program runs."""

    @property
    def period(self) -> int:
        """Return a number of steps of which any so many in a row have every input shape."""

    def build(self, dtype: torch.dtype) -> Parts:
        """Return new modules, each time with the same float32 weights, converted to ``dtype``.

        Both eager and compiled are judged by float64; a program that cannot run in it raises. One in half precision
        converts to that in place of float32 alone.
        """

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        """Yield the training steps."""

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        """Yield the steps of inference: repeated calls."""


@dataclass(frozen=True)
class Site:
    """Tells a program of an installed package where to run: this rank's device, the job's mesh, seed and files."""

    device: torch.device
    mesh: Mesh
    seed: int
    layout: DataLayout


def build_parts(program: Program, dtype: torch.dtype) -> Parts:
    """Return new parts of a program. Raises ``TypeError`` if it builds anything else, or in half precision what is to
    be exact.
    """
    parts: object = program.build(dtype)
    if not isinstance(parts, Parts):
        raise TypeError(f"build({dtype}) returns a {type(parts).__name__}; expected Parts")
    made = {value.dtype for value in parts.members().values() if value.is_floating_point()}
    if dtype is torch.float64 and made and made <= _HALF:
        half = "half precision takes the place of float32 alone"
        raise TypeError(f"build({dtype}) returns modules in {made.pop()}; expected {dtype}: {half}")
    return parts


Maker = Callable[[Any, Site], Program]
"""Makes a program from its configuration; ``ProgramKind.function`` names one."""


_HALF = frozenset({torch.bfloat16, torch.float16})


class Steps(Iterator[Step]):
    """A program's steps of one phase. A program that yields a step within ``no_grad`` finds gradients off when it
    continues, and the caller of the step has them as before.
    """

    def __init__(self, steps: Iterator[Step], phase: Phase) -> None:
        self._steps, self._phase = steps, phase
        self._has_gradients = torch.is_grad_enabled()

    @property
    def site(self) -> CallSite:
        """Return where the program yielded its last step; the class of what gives them if that is no generator."""
        steps: object = self._steps
        while isinstance(inner := getattr(steps, "gi_yieldfrom", None), GeneratorType):
            steps = inner
        frame = getattr(steps, "gi_frame", None)
        if frame is None:
            return CallSite(type(steps).__qualname__, 0, "__next__")
        return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def __next__(self) -> Step:
        with torch.set_grad_enabled(self._has_gradients):
            try:
                step = next(self._steps)
            except StopIteration:
                raise ValueError(f"the program's {self._phase} steps ended; its iterator must never end") from None
            self._has_gradients = torch.is_grad_enabled()
        if not isinstance(step, Step):
            raise TypeError(f"the program's {self._phase} step yields a {type(step).__name__}; expected a Step")
        return step


def make(config: ProgramConfig, parallel: ParallelSpec, site: Site) -> tuple[Program, Fingerprint]:
    """Return the program of an installed package, and what a gate holds for; another version of the package, or other
    sources in it, is another program.
    """
    maker: Maker = PROGRAMS.function(config.name)
    provided = PROGRAMS.provided[config.name]
    own: Fingerprint = {f"program.{name}": plain(value) for name, value in config.model_dump(mode="json").items()}
    own["program.package"] = f"{provided.distribution} {provided.version}"
    own["program.sources"] = sources_of(provided.declaration.function)
    return maker(config, site), own | environment(parallel, site.device)
