"""Writes a reproduction that needs only PyTorch and safetensors: a script, and its tensors beside it."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import psutil
from safetensors.torch import save_file
from torch import Tensor, fx

from service.compilation.diagnosis import check
from service.compilation.diagnosis.graphs import Captured, UnsuitableError
from service.compilation.instruments.caches import owned_folder
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Tolerance
from service.torch_internals.table import internal_if_there

NAME = "reproduction"

HEAD = '''"""{about}

Prints the fault and exits with status 1 while it persists; exits with 0 once it is gone.
"""

{functions}

import os
import sys
from math import inf, nan
from pathlib import Path

from safetensors.torch import load_file
from torch import device

BACKEND = os.environ.get("TORCH_COMPILE_BACKEND", {backend!r})
MODE = {mode!r} if BACKEND == {backend!r} else None


class Graph(torch.nn.Module):
{forward}


def main() -> None:
    tensors = load_file(Path(__file__).with_suffix(".safetensors"), device={device!r})
    inputs = {inputs}
    graph = Graph()
    compiled = torch.compile(graph, backend=BACKEND, mode=MODE)
    found = difference(graph, compiled, inputs, absolute={absolute!r}, ratio={ratio!r})
    print(found or "nothing is wrong")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
'''
_KNOWN = frozenset({"torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"})
"""Global names that a script imports, or does not need."""


PROCESSOR_S, CLOCK_S = 60, 300
"""Limits of a process in seconds: of a processor, which say the same on a busy machine, and of the clock, for one that
waits for something that never comes.
"""


@dataclass(frozen=True)
class ScriptOutcome:
    """Says how a process ended: whether it showed the fault, and the last line that it printed. ``shown`` is ``None``
    if that was not measured; ``said`` then has the limit that it reached.
    """

    shown: bool | None
    said: str


def write(captured: Captured, rung: Rung, tolerance: Tolerance, about: str, folder: Path) -> Path:
    """Write ``reproduction.py`` and ``reproduction.safetensors`` into ``folder``; the script's path."""
    if not isinstance(rung.backend, str):
        raise UnsuitableError("its backend has no name")
    tensors = {str(i): value.detach() for i, value in enumerate(captured.inputs) if isinstance(value, Tensor)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / f"{NAME}.safetensors")
    text = HEAD.format(
        about=about,
        functions=inspect.getsource(check).partition('"""\n')[2].strip(),
        backend=rung.backend,
        mode=rung.mode,
        forward=indent(_source(captured.graph), "    "),
        device=next((str(value.device) for value in tensors.values()), "cpu"),
        inputs=f"[{', '.join(_input(index, value) for index, value in enumerate(captured.inputs))}]",
        absolute=tolerance.absolute,
        ratio=tolerance.ratio,
    )
    path = folder / f"{NAME}.py"
    path.write_text(text)
    return path


def _source(graph: fx.GraphModule) -> str:
    """Return the graph's ``forward`` as Python; :class:`UnsuitableError` if it uses names that a script lacks."""
    for node in graph.graph.nodes:
        node.type = None  # annotations may name anything
    code = graph.graph.python_code("self")
    if strange := sorted(set(code.globals) - _KNOWN):
        raise UnsuitableError(f"its graph names {strange[0]}, which a script does not have")
    return "\n".join(line for line in code.src.splitlines() if line.strip())


def _input(index: int, value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f'tensors["{index}"].requires_grad_()' if value.requires_grad else f'tensors["{index}"]'


def run(script: Path, timeout_s: float = CLOCK_S) -> ScriptOutcome:
    """Run the script in a process of its own with empty caches."""
    return _process([sys.executable, str(script)], timeout_s)


def bisect(script: Path, timeout_s: float) -> str:
    """Return the result of PyTorch's own bisector for the script: the backend at fault, and the pass or lowering in
    it.

    Empty if it finds none, or torch has no bisector; if it has no answer in time, that is said.
    """
    bisector = internal_if_there("torch._inductor.compiler_bisector")
    if bisector is None:
        return ""
    command = [sys.executable, "-m", bisector.__name__, "run", sys.executable, str(script)]
    outcome = _process(command, timeout_s)
    if outcome.shown is None:
        return f"the part of the compiler at fault was not measured: {outcome.said}"
    said = outcome.said
    return said.removeprefix("Bisection complete: ") if said.startswith("Bisection complete: Bisection") else ""


def _process(command: list[str], timeout_s: float) -> ScriptOutcome:
    if timeout_s <= 0:
        return ScriptOutcome(None, "there was no time left to run it")
    with owned_folder() as folder:
        lone = {name: value for name, value in os.environ.items() if name not in GROUP}
        environment = lone | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        try:
            status, printed, told = _wait_for_end(_limit_processor_time(command), environment, folder, timeout_s)
        except subprocess.TimeoutExpired:
            return ScriptOutcome(None, f"it was still running after {timeout_s:.0f} s")
    if status == -signal.SIGXCPU:
        return ScriptOutcome(None, f"it took more than {PROCESSOR_S} s of a processor")
    lines = [line for line in printed.splitlines() if line.strip()]
    said = lines[-1] if lines else (told.strip().splitlines() or [""])[-1]
    return ScriptOutcome(status == 1 and bool(lines), said)


def _limit_processor_time(command: list[str]) -> list[str]:
    """Return the command with a limit of processor time, for each of its processes. A rank may not set that of another
    process, so a shell sets its own.
    """
    return ["/bin/sh", "-c", f'ulimit -S -t {PROCESSOR_S}; exec "$@"', "sh", *command]


def _wait_for_end(
    command: list[str], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> tuple[int, str, str]:
    """Return the exit status, and what was written to stdout and stderr; raises ``TimeoutExpired`` with nothing left
    running.

    Output goes into files: a pipe does not end before all processes that the command started have ended.
    """
    printed, told = folder / "stdout", folder / "stderr"
    with printed.open("wb") as out, told.open("wb") as err:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            status = process.wait(timeout_s)
        except BaseException:
            _kill_with_descendants(process)
            raise
    return status, printed.read_text(errors="replace"), told.read_text(errors="replace")


def _kill_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants: the bisector runs the script in a process of its own, which would outlive it;
    so would compile workers.
    """
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for its ranks; the script is no part of the group."""
