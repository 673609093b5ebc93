"""One model of ``benchmarks/model_zoo.py``, in a process of its own: exported, loaded, bounded, sampled; and the peer.

Facts are written as they are found, one JSON object a line, so that those of a process that is ended are not lost.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from verify import PEER_METHODS
from zoo_models import ZOO, Entry, seeded

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import OnnxModel, load
from service.bounds.workspace import keep_workspaces_small
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN

ROWS, POINTS, AT_ONCE = 16, 2000, 100
"""Outputs that are bounded, points that are sampled, and how many of them go together."""
AGAIN_S = 1.0
"""A run that takes less is done again, warm, and the second is the one that counts."""
LEGACY, DYNAMO = (17, 18, 19, 20), (18, 20, 21, 22, 23, 24)
"""Opsets that the exporters write in turn."""
Bound = Callable[[], tuple[Tensor, Tensor]]


class OutOfTimeError(BaseException):
    """What was measured took longer than it may; no handler of errors takes it for one."""


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


@dataclass
class Log:
    """Where facts go."""

    file: TextIO

    def tell(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self.file, flush=True)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def exports(model: Any, x: Tensor, number: int) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield each exporter with its opset and what writes the file."""
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


def accepted(model: Any, x: Tensor, number: int, log: Log, seconds: float) -> OnnxModel | None:
    """Return the first file that is accepted, loaded; every exporter's is tried."""
    found = None
    for exporter, opset, write in exports(model, x, number):
        facts: dict[str, Any] = {"exporter": exporter, "opset": opset}
        try:
            with limited(seconds), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = write()
        except (Exception, OutOfTimeError) as error:
            log.tell(**facts, said="not exported", why=_reason(error))
            continue
        try:
            with limited(seconds):
                module = load(content)
                prepare(module, (module.features,))
        except (UnsupportedModelError, OutOfTimeError) as error:
            log.tell(**facts, said="refused", why=_reason(error))
        except Exception as error:
            log.tell(**facts, said="failed", why=_reason(error))
        else:
            log.tell(**facts, said="accepted")
            found = found or module
    return found


def ours(module: OnnxModel, box: Interval, method: str) -> Bound:
    network = prepare(module, (module.features,))
    identity = torch.eye(module.outputs, dtype=box.lower.dtype, device=box.lower.device)[:ROWS]
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


def measured(who: str, method: str, make: Callable[[], Bound], log: Log, given: argparse.Namespace) -> Any:
    """Return bounds, and tell what they took; ``None`` where there are none."""
    facts, device = {"who": who, "method": method}, torch.device(given.device)
    gc.collect()
    before = _reset_peak(device)
    started = time.perf_counter()
    try:
        with limited(given.seconds):
            bound = make()
            for _ in range(2):
                started = time.perf_counter()
                found = [each.detach() for each in bound()]
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if (spent := time.perf_counter() - started) > AGAIN_S:
                    break
    except (Exception, OutOfTimeError) as error:
        log.tell(**facts, why=_reason(error), seconds=time.perf_counter() - started)
        return None
    lower, upper = (each.double().flatten() for each in found)
    width = (upper - lower).mean().item()
    log.tell(**facts, width=width, seconds=spent, mib=(_peak(device) - before) / 2**20)
    return lower, upper


def _reset_peak(device: torch.device) -> int:
    """Return the bytes that are taken now, from where on the peak counts."""
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
    """Return the least and the greatest outputs met, in float64: half of the points are corners."""
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
    """Return by how much points lie outside of bounds, less the margin that verdicts leave for float32."""
    lower, upper = (each.cpu() for each in bounds)
    size = torch.maximum(lower.abs(), upper.abs()).nan_to_num(posinf=0.0)
    margin = RELATIVE_MARGIN[torch.float32] * size + ABSOLUTE_MARGIN[torch.float32]
    excess = torch.maximum(lower - met[0], met[1] - upper) - margin
    return float(excess.nan_to_num(nan=torch.inf).max())


def run(entry: Entry, number: int, log: Log, given: argparse.Namespace) -> None:
    """Measure one entry."""
    model, x = seeded(entry)
    module = accepted(model, x, number, log, given.seconds)
    device = torch.device(given.device)
    box = Interval(*(end.flatten()[None].to(device) for end in (x - entry.eps, x + entry.eps)))
    outputs = ROWS
    if module is not None:
        module, outputs = module.to(device), module.outputs
        torch.set_grad_enabled(mode=True)
        bounds = {}
        for method in given.methods:
            found = measured("Trivet", method, lambda method=method: ours(module, box, method), log, given)  # type: ignore[misc]
            bounds |= {} if found is None else {method: found}
        met = sampled(module, box)
        log.tell(sampled=float((met[1] - met[0]).mean()))
        for method, found in bounds.items():
            log.tell(beyond=method, by=beyond(found, met))
    if given.peer and isinstance(model, nn.Module):
        model.to(device)
        shaped = box.map(lambda end: end.reshape(1, *entry.shape))
        for method in given.methods:
            measured("peer", method, lambda method=method: peers(model, shaped, outputs, method), log, given)  # type: ignore[misc]


def warm_up() -> None:
    """Export and trace a net of one number, so that forks need not import what that takes, within their limits."""
    net, x = nn.Linear(1, 1).eval(), torch.zeros(1)
    for _, _, write in exports(net, x, 0):
        with suppress(Exception), warnings.catch_warnings():  # what is not installed fails in the forks, with words
            warnings.simplefilter("ignore")
            module = load(write())
            prepare(module, (module.features,))


def into(path: Path, name: str, given: argparse.Namespace) -> None:
    """Measure the entry of a name, and write its facts to a file."""
    if given.peer:
        sys.path.insert(0, str(given.peer))
    keep_workspaces_small()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    with path.open("a") as file:
        log = Log(file)
        try:
            run(ZOO[name], list(ZOO).index(name), log, given)
        except ImportError as error:
            log.tell(skipped=f"{error.name or error} is not installed")
        except Exception as error:
            log.tell(ended=_reason(error))
