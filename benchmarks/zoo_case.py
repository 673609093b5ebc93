"""Measures one model of ``benchmarks/model_zoo.py`` in a process of its own: exports, loads, bounds and samples it,
and runs the peer.

Facts are written as they are found, one JSON object a line, so that a killed process loses none.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from verify import PEER_METHODS
from zoo_models import ZOO, Entry, seeded

from service.bounds.full_float32 import forbid_tf32
from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.memory import keep_freed_memory, keep_workspaces_small
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network, from_graph, prepare
from service.bounds.onnx import OnnxModel, load
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN

ROWS, POINTS, AT_ONCE = 16, 2000, 100
"""Outputs that are bounded, points that are sampled, and how many of them go together."""
AGAIN_S, RUNS = {"cpu": 1.0, "cuda": 20.0}, 20
"""A run is repeated until all took so long, or so often; the median of those after the first counts, which builds
kernels.
"""
LEGACY, DYNAMO = (17, 18, 19, 20), (18, 20, 21, 22, 23, 24)
"""Opsets that the exporters write in turn."""
Bound = Callable[[], tuple[Tensor, Tensor]]
Export = tuple[str, int, Callable[[], bytes]]


class OutOfTimeError(BaseException):
    """A measurement took longer than it may; no handler of errors takes it for one."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End the body with :class:`OutOfTimeError` after some seconds."""

    def ring(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A file that is accepted: the module, and the network that is bounded."""

    module: OnnxModel
    network: Network


@dataclass(frozen=True)
class Place:
    """The device of a method, and its most seconds."""

    device: torch.device
    seconds: float

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process measures on the same GPU."""
        if self.device.type == "cpu":
            yield
            return
        torch.zeros(1, device=self.device)  # the first call of a process takes a while
        with (Path(tempfile.gettempdir()) / "zoo-gpu").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield


@dataclass
class Log:
    """The file of facts."""

    file: TextIO

    def tell(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self.file, flush=True)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def exports(model: Any, x: Tensor, number: int) -> Iterator[Export]:
    """Yield each exporter with its opset and the function that writes the file."""
    if not isinstance(model, nn.Module):
        yield "skl2onnx", LEGACY[number % len(LEGACY)], lambda: _sklearn(model, x, LEGACY[number % len(LEGACY)])
        return
    for name, opsets in (("dynamo", DYNAMO), ("legacy", LEGACY)):
        opset = opsets[number % len(opsets)]
        yield name, opset, lambda name=name, opset=opset: _torch(model, x, name == "dynamo", opset)  # type: ignore[misc]


def _sklearn(model: Any, x: Tensor, opset: int) -> bytes:
    from skl2onnx import to_onnx  # type: ignore[import-not-found]

    content: bytes = to_onnx(model, x.reshape(1, -1).numpy(), target_opset=opset).SerializeToString()
    return content


def _torch(model: nn.Module, x: Tensor, dynamo: bool, opset: int) -> bytes:
    given = {"opset_version": opset, "dynamo": dynamo}
    if dynamo:
        program = torch.onnx.export(model, (x[None],), verbose=False, external_data=False, **given)  # type: ignore[arg-type]
        assert program is not None
        content: bytes = program.model_proto.SerializeToString()
        return content
    file = io.BytesIO()
    torch.onnx.export(model, (x[None],), file, **given)  # type: ignore[arg-type]
    return file.getvalue()


def accepted(model: Any, x: Tensor, number: int, log: Log, given: argparse.Namespace) -> Loaded | None:
    """Return a file that is accepted, loaded; every exporter's is tried, all but the last in processes beside this, or
    only until one is accepted.
    """
    seconds = given.export_seconds
    *others, last = exports(model, x, number)
    if given.first:
        return next(filter(None, (_taken(each, log, seconds) for each in (last, *others))), None)
    beside = [multiprocessing.get_context("fork").Process(target=_taken, args=(each, log, seconds)) for each in others]
    for process in beside:
        process.start()
    found = _taken(last, log, seconds)
    for process in beside:
        process.join()
    silent = Log(Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as the process
    return found or next(filter(None, (_taken(each, silent, seconds) for each in others)), None)


def _taken(export: Export, log: Log, seconds: float) -> Loaded | None:
    """Write one exporter's file, load it, and tell the outcome."""
    exporter, opset, write = export
    facts: dict[str, Any] = {"exporter": exporter, "opset": opset}
    try:
        with limited(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = write()
    except (Exception, OutOfTimeError) as error:
        log.tell(**facts, said="not exported", why=_reason(error))
        return None
    try:
        with limited(seconds):
            module = load(content)
            started = time.perf_counter()
            network = prepare(module, (module.features,))
    except (UnsupportedModelError, OutOfTimeError) as error:
        log.tell(**facts, said="refused", why=_reason(error))
        return None
    except Exception as error:
        log.tell(**facts, said="failed", why=_reason(error))
        return None
    log.tell(**facts, said="accepted", capture=time.perf_counter() - started)
    return Loaded(module, network)


def ours(network: Network, box: Interval, method: str) -> Bound:
    identity = torch.eye(network.graph.output.size, dtype=box.lower.dtype, device=box.lower.device)[:ROWS]
    rows = torch.cat([identity, -identity])[None]

    @torch.no_grad()
    def bound() -> tuple[Tensor, Tensor]:
        lower, negated = METHODS[method](network, box, BoundOptions()).lower_bounds(rows).chunk(2, dim=1)
        return lower, -negated

    return bound


def peers(module: nn.Module, box: Interval, outputs: int, method: str) -> Bound:
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm  # type: ignore[import-not-found]

    bounded = BoundedModule(module, box.centre, device=str(box.lower.device))
    rows = torch.eye(outputs, device=box.lower.device)[None, :ROWS] if outputs > ROWS else None

    def bound() -> tuple[Tensor, Tensor]:
        x = BoundedTensor(box.centre, PerturbationLpNorm(x_L=box.lower, x_U=box.upper))
        found: tuple[Tensor, Tensor] = bounded.compute_bounds(x=(x,), C=rows, method=PEER_METHODS[method])
        return found

    return bound


def measured(who: str, method: str, make: Callable[[], Bound], log: Log, place: Place) -> Any:
    """Return bounds, and tell their cost; ``None`` if there are none."""
    facts, device = {"who": who, "method": method, "device": place.device.type}, place.device
    gc.collect()
    before = _reset_peak(device)
    started = time.perf_counter()
    try:
        with limited(place.seconds):
            bound, spent = make(), list[float]()
            while not spent or (sum(spent) < AGAIN_S[device.type] and len(spent) < RUNS):
                started = time.perf_counter()
                found = [each.detach() for each in bound()]
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                spent.append(time.perf_counter() - started)
    except (Exception, OutOfTimeError) as error:
        log.tell(**facts, why=_reason(error), seconds=time.perf_counter() - started)
        return None
    lower, upper = (each.double().flatten() for each in found)
    width = (upper - lower).mean().item()
    log.tell(**facts, width=width, seconds=median(spent[1:] or spent), mib=(_peak(device) - before) / 2**20)
    return lower, upper


def _reset_peak(device: torch.device) -> int:
    """Return the bytes in use now, from which the peak counts."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # else the peak is that of the process's whole life
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@torch.no_grad()
def sampled(module: OnnxModel, box: Interval) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest sampled outputs, in float64: half of the points are corners."""
    module = module.double()
    generator = torch.Generator().manual_seed(1)
    lower, upper = (end.double().cpu() for end in (box.lower, box.upper))
    least = greatest = None
    for part in range(POINTS // AT_ONCE):
        share = torch.rand(AT_ONCE, lower.shape[1], generator=generator, dtype=torch.float64)
        points = lower + (share.round() if part % 2 else share) * (upper - lower)
        found = module(points.to(box.lower.device)).flatten(1)[:, :ROWS].cpu()
        low, high = found.amin(dim=0), found.amax(dim=0)
        least = low if least is None else torch.minimum(least, low)
        greatest = high if greatest is None else torch.maximum(greatest, high)
    assert least is not None
    assert greatest is not None
    return least, greatest


def beyond(bounds: tuple[Tensor, Tensor], met: tuple[Tensor, Tensor]) -> float:
    """Return by how much points lie outside bounds, less the margin of verdicts in float32."""
    lower, upper = (each.cpu() for each in bounds)
    size = torch.maximum(lower.abs(), upper.abs()).nan_to_num(posinf=0.0)
    margin = RELATIVE_MARGIN[torch.float32] * size + ABSOLUTE_MARGIN[torch.float32]
    excess = torch.maximum(lower - met[0], met[1] - upper) - margin
    return float(excess.nan_to_num(nan=torch.inf).max())


def run(entry: Entry, number: int, log: Log, given: argparse.Namespace) -> None:
    """Measure one entry on each device: Trivet, and the peer."""
    model, x = seeded(entry)
    loaded = accepted(model, x, number, log, given)
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(mode=True)
    box, found = Interval(*((x + moved).flatten()[None] for moved in (-entry.eps, entry.eps))), {}
    for name in given.device:
        place = Place(torch.device(name), given.seconds)
        with place.alone():
            here = box.map(place.put)
            if loaded is not None:
                network = from_graph(loaded.network.graph.to(place.device))
                for method in given.methods:
                    bounds = measured("Trivet", method, lambda m=method: ours(network, here, m), log, place)  # type: ignore[misc]  # noqa: B023
                    found |= {} if bounds is None else {(name, method): bounds}
            if given.peer and isinstance(model, nn.Module):
                outputs = ROWS if loaded is None else loaded.module.outputs
                shaped, module = here.map(lambda end: end.reshape(1, *entry.shape)), model.to(place.device)
                for method in given.methods:
                    measured("peer", method, lambda m=method: peers(module, shaped, outputs, m), log, place)  # type: ignore[misc]  # noqa: B023
    if loaded is not None:
        met = sampled(loaded.module, box)
        log.tell(sampled=float((met[1] - met[0]).mean()))
        for (name, method), bounds in found.items():
            log.tell(beyond=method, device=name, by=beyond(bounds, met))


def warm_up() -> None:
    """Export and trace a net of one number, so that forks need not import those modules within their limits."""
    net, x = nn.Linear(1, 1).eval(), torch.zeros(1)
    for _, _, write in exports(net, x, 0):
        with suppress(Exception), warnings.catch_warnings():  # a missing package fails in the forks, with a message
            warnings.simplefilter("ignore")
            module = load(write())
            prepare(module, (module.features,))


def into(path: Path, name: str, given: argparse.Namespace, cores: Sequence[int]) -> None:
    """Measure the entry of a name on these cores, or on all, and write its facts to a file."""
    if cores:
        os.sched_setaffinity(0, cores)
    if given.peer:
        sys.path.insert(0, str(given.peer))
    keep_workspaces_small()
    keep_freed_memory()
    torch.backends.mha.set_fastpath_enabled(
        False
    )  # what is exported without gradients otherwise, and nobody else reads
    forbid_tf32()
    with path.open("a") as file:
        log = Log(file)
        try:
            run(ZOO[name], list(ZOO).index(name), log, given)
        except ImportError as error:
            log.tell(skipped=f"{error.name or error} is not installed")
        except Exception as error:
            log.tell(ended=_reason(error))
