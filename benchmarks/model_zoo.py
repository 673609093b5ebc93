"""Exports and bounds common models: which are accepted, how tight and how fast, beside a peer.

    python benchmarks/model_zoo.py [--only NAME …] [--methods ibp crown alpha-crown] [--seconds 60] [--peer PATH]

Models come from torch, torchvision, timm, transformers and scikit-learn, by configuration with random weights
(``zoo_models.py``, ``zoo_nets.py``); those of a package that is not installed are skipped. Each has a process of its
own with a limit (``zoo_case.py``). torch's two exporters write it, with the opsets from 17 to the newest in turn.
Bounds are those of the first file that is accepted, on the box ``|x − x0| ≤ eps``, of at most 16 outputs. *sampled* is
the mean width of the outputs of 2,000 points, of which half are corners; *inside* says whether all of them lay within
every bound. Where a checkout of auto_LiRPA is at ``--peer``, it bounds the same module on the same box in the same
process.
With ``--json`` a model that the file has already is not run again: a long run can go in parts. With ``--device cpu
cuda`` both are measured on one host: models side by side on ``--pairs`` of cores, and one at a time on the GPU. On a
host with a GPU the CPU alone is measured with ``CUDA_VISIBLE_DEVICES=``, since processes fork after a first trace.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import zoo_case
from zoo_models import GROUPS, REFUSED_ON_PURPOSE, ZOO

STARTING_S = 60.0
"""Seconds that a process may take beside its exports and its methods: imports, samples."""
WIDER, PEER_WIDER = 1 + 1e-3, 1.5
"""How much wider a bound is than another before it counts as wider; and than the peer's, at most."""
EXPORTERS = {"dynamo": "d", "legacy": "l", "skl2onnx": "s"}
Fact = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """The facts about one model."""

    name: str
    facts: Sequence[Fact]

    def on(self, device: str) -> Row:
        """Return the row without the measurements on other devices."""
        return Row(self.name, [each for each in self.facts if each.get("device", device) == device])

    def bounded(self, who: str, method: str) -> Fact:
        """Return the fact of a method; empty if it was not run."""
        return next((each for each in self.facts if each.get("who") == who and each.get("method") == method), {})

    def width(self, who: str, method: str) -> float | None:
        return self.bounded(who, method).get("width")

    @property
    def exports(self) -> list[Fact]:
        return [each for each in self.facts if "exporter" in each]

    @property
    def skipped(self) -> str | None:
        return next((each["skipped"] for each in self.facts if "skipped" in each), None)

    @property
    def ended(self) -> str | None:
        """Return how the process ended, if it did not finish."""
        return next((each["ended"] for each in self.facts if "ended" in each), None)

    @property
    def is_accepted(self) -> bool:
        """Return whether every file that an exporter wrote is accepted, and there is one."""
        said = {each["said"] for each in self.exports}
        return "accepted" in said and said <= {"accepted", "not exported"}

    @property
    def outside(self) -> list[str]:
        return [each["beyond"] for each in self.facts if "beyond" in each and each["by"] > 0]

    @property
    def is_sampled(self) -> bool:
        return any("beyond" in each for each in self.facts)

    @property
    def sampled(self) -> float | None:
        return next((each["sampled"] for each in self.facts if "sampled" in each), None)


@dataclass(eq=False)
class Running:
    """A model in a process of its own, mostly a fork of this one, which has imported the packages; its facts
    count, however it ends.
    """

    name: str
    cores: tuple[int, ...]
    path: Path
    process: BaseProcess
    deadline: float

    @classmethod
    def start(cls, name: str, given: argparse.Namespace, cores: tuple[int, ...], folder: Path) -> Running:
        with contextlib.suppress(ImportError):
            importlib.import_module(ZOO[name].package)
        path = folder / name
        process = multiprocessing.get_context(given.start).Process(
            target=zoo_case.into, args=(path, name, given, cores)
        )  # type: ignore[attr-defined]
        process.start()
        runs = len(given.methods) * len(given.device) * (2 if given.peer else 1)
        limit = 3 * given.export_seconds + runs * given.seconds + STARTING_S
        return cls(name, cores, path, process, time.monotonic() + limit)

    def ended(self) -> Row | None:
        """Return the facts about the model once its process has ended, by itself or by the clock."""
        said = None
        if self.process.is_alive():
            if time.monotonic() < self.deadline:
                return None
            said = "ended at its limit"
            self.process.kill()
        self.process.join()
        said = said or (f"exit {self.process.exitcode}" if self.process.exitcode else None)
        facts = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return Row(self.name, [*facts, *([{"ended": said}] if said else [])])


def measured(names: Iterable[str], given: argparse.Namespace) -> Iterator[Row]:
    """Yield the facts about models as their processes end, as many side by side as there are pairs of cores."""
    cores = sorted(os.sched_getaffinity(0))
    free: list[tuple[int, ...]] = [tuple(cores[2 * index : 2 * index + 2]) for index in range(given.pairs)] or [()]
    waiting, running = list(names)[::-1], list[Running]()  # nets of torch alone take the least
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and free:
                running.append(Running.start(waiting.pop(0), given, free.pop(), Path(folder)))
            time.sleep(0.05)
            for each in list(running):
                if (row := each.ended()) is not None:
                    running.remove(each)
                    free.append(each.cores)
                    yield row


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _took(fact: Fact) -> str:
    """Return the seconds of a method, or what ended it."""
    if not fact:
        return ""
    return f"{fact['seconds']:.2g}" if "width" in fact else fact["why"].split(":")[0]


def cells(row: Row, methods: Sequence[str]) -> list[str]:
    """Return the row's cells as text."""
    said = [f"{EXPORTERS[each['exporter']]}{each['opset']} {each['said']}" for each in row.exports]
    accepted = row.skipped or ("yes" if row.is_accepted else ", ".join(said) or row.ended or "")
    mib = [fact.get("mib", 0.0) for fact in (row.bounded("Trivet", method) for method in methods)]
    found = [row.name, accepted, *(_number(row.width("Trivet", method)) for method in methods), _number(row.sampled)]
    found += [_took(row.bounded("Trivet", method)) for method in methods]
    found += [_number(max(mib)) if any(mib) else "", _inside(row)]
    linear = [method for method in methods if method != "ibp"]
    found += [_number(row.width("peer", method)) for method in linear]
    return found + [_took(row.bounded("peer", method)) for method in linear]


def _inside(row: Row) -> str:
    return "" if not row.is_sampled else (", ".join(row.outside) or "yes")


def header(methods: Sequence[str]) -> list[str]:
    linear = [method for method in methods if method != "ibp"]
    found = ["model", "accepted", *methods, "sampled", *(f"{method} s" for method in methods), "MiB", "inside"]
    return found + [f"peer {method}" for method in linear] + [f"peer {method} s" for method in linear]


def line(found: Iterable[str]) -> str:
    return f"| {' | '.join(found)} |"


def summary(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the summary of all rows, and the names of those that fall short."""
    run = [row for row in rows if row.skipped is None]
    refused = [row.name for row in run if not row.is_accepted and row.name not in REFUSED_ON_PURPOSE]
    yield f"{len(run)} models run, {len(rows) - len(run)} skipped; not accepted: {_names(refused)}"
    yield f"outside of a bound: {_names([row.name for row in run if row.outside])}"
    for wide, narrow in (("crown", "ibp"), ("alpha-crown", "crown")):
        pairs = [(row.name, row.width("Trivet", wide), row.width("Trivet", narrow)) for row in run]
        wider = [name for name, own, other in pairs if own is not None and other is not None and own > other * WIDER]
        yield f"{wide} wider than {narrow}: {_names(wider)}"
    for method in ("crown", "alpha-crown"):
        yield from _beside_peer(run, method)


def _beside_peer(rows: Sequence[Row], method: str) -> Iterable[str]:
    both = [(row, row.bounded("Trivet", method), row.bounded("peer", method)) for row in rows]
    both = [(row, own, peer) for row, own, peer in both if "width" in own and "width" in peer]
    if not both:
        return
    ratios = {row.name: _ratio(own["width"], peer["width"]) for row, own, peer in both}
    no_wider = sum(ratio <= WIDER for ratio in ratios.values())
    far = [name for name, ratio in ratios.items() if ratio > PEER_WIDER]
    speeds = sorted(peer["seconds"] / own["seconds"] for _, own, peer in both)
    median = speeds[len(speeds) // 2]
    yield (
        f"{method} beside the peer: {len(both)} models, no wider on {no_wider}, over {PEER_WIDER} × as wide: "
        f"{_names(far)}; {median:.1f} × as fast (median), least {speeds[0]:.2g} ×"
    )


def _ratio(own: float, peer: float) -> float:
    """Return how wide a bound is beside the peer's; missing bounds count as infinitely wide."""
    own, peer = (math.inf if math.isnan(each) else each for each in (own, peer))
    if math.isinf(peer):
        return 0.0 if math.isfinite(own) else 1.0
    return own / peer if peer > 0 else (math.inf if own > 0 else 1.0)


def _names(found: Sequence[str]) -> str:
    return ", ".join(found) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="names or patterns, or groups: " + ", ".join(GROUPS))
    parser.add_argument("--methods", nargs="*", default=["ibp", "crown", "alpha-crown"])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each method")
    parser.add_argument("--export-seconds", type=float, default=60.0, help="for each export, and for loading its file")
    parser.add_argument("--first", action="store_true", help="no further export once a file is accepted")
    parser.add_argument("--device", nargs="+", default=["cpu"], help="cpu, cuda, or both, one after the other")
    parser.add_argument("--pairs", type=int, default=0, help="models side by side, each on a pair of cores")
    parser.add_argument("--start", default="fork", choices=["fork", "spawn"], help="how processes of models start")
    parser.add_argument("--threads", type=int, default=1, help="of each model")
    parser.add_argument("--peer", type=Path, help="a checkout of auto_LiRPA")
    parser.add_argument("--json", type=Path, help="facts; models that it has already are not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    known: dict[str, Sequence[Fact]] = {}
    if given.json and given.json.exists():
        known = json.loads(given.json.read_text())
    patterns = [name for each in given.only for name in GROUPS.get(each, {each: None})]
    names = [name for name in ZOO if any(fnmatch(name, pattern) for pattern in patterns)]
    if given.start == "fork" and "cuda" not in given.device:
        zoo_case.warm_up()  # tracing begins with CUDA where there is one, which a fork could not go on with
    for row in measured([name for name in names if name not in known], given):
        known[row.name] = row.facts
        print(line(cells(row.on(given.device[0]), given.methods)), flush=True)
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    for device in given.device:
        rows = [Row(name, known[name]).on(device) for name in names]
        print(f"\n{device}\n\n" + line(header(given.methods)) + "\n" + "|---" * len(header(given.methods)) + "|")
        for row in rows:
            print(line(cells(row, given.methods)))
        print()
        for each in summary(rows):
            print(f"- {each}")


if __name__ == "__main__":
    main()
