"""Measures training throughput and memory of a 1.1-billion-parameter transformer in every layout, beside a peer's
figures.

Each row is a torchrun group of its own that builds the model as a training job does and takes the job's own optimizer
steps (forward, backward, agreement on loss and gradient norm, clipping, AdamW) on random tokens. Printed are the
median after the first ten steps, MFU by ``6·(N − N_emb) + 12·L·H·d_head·sequence`` FLOP per token, and the largest peak
of *reserved* memory over the ranks. Rows that need fewer GPUs than there are run side by side.

    python benchmarks/train.py [--gpus 4] [--rows fsdp4,tp4,…] [--vary fsdp1:micro=2,checkpoint=selective] …
    python benchmarks/train.py --profile tp4
    python benchmarks/train.py --smoke          # tiny, on the CPU: does every row run?
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train_rows import PEER_NAME, PEERS, ROWS, Row, varied

HERE = Path(__file__).parent
COLUMNS = ("layout", "GPUs", "tok/s/GPU", "TFLOP/s", "MFU %", "GiB", "peer tok/s/GPU", "ratio", "peer GiB")


def waves(rows: Iterable[Row], gpus: int) -> Iterator[list[tuple[Row, int]]]:
    """Rows that fit side by side, each with its first GPU; order is kept."""
    wave: list[tuple[Row, int]] = []
    used = 0
    for row in rows:
        if used + row.gpus > gpus and wave:
            yield wave
            wave, used = [], 0
        wave.append((row, used))
        used += row.gpus
    if wave:
        yield wave


def run(row: Row, first_gpu: int, options: argparse.Namespace) -> dict[str, Any]:
    """Launch one row; return its figures, or ``{"row", "error"}`` with the end of its ranks' output."""
    with tempfile.TemporaryDirectory() as scratch:
        given = {"row": asdict(row), "folder": scratch, "smoke": options.smoke, "steps": options.steps}
        given |= {"warmup": options.warmup, "profile": row.name in options.profile.split(",")}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(row.gpus)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        command += [str(HERE / "train_rank.py"), json.dumps(given)]
        began = time.perf_counter()
        try:
            ended = subprocess.run(
                command,
                env=environment(row, first_gpu, options),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=options.timeout,
                check=False,
            )
            output = ended.stdout
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"") + f"\nstill running after {options.timeout} s".encode()
        result = Path(scratch, "result.json")
        found: dict[str, Any] = {"row": row.name, "gpus": row.gpus, "error": of_ranks(output)}
        if result.exists():
            found = json.loads(result.read_text())
        found["wall_s"] = time.perf_counter() - began
        if (profile := Path(scratch, "profile.txt")).exists():
            found["profile"] = profile.read_text()
        return found


def of_ranks(output: bytes) -> str:
    """The end of the ranks' output, without the launcher's own traceback."""
    text = output.decode(errors="replace")
    return re.split(r"\n.*(?:Sending process|failed \(exitcode)", text)[0][-4000:]


def environment(row: Row, first_gpu: int, options: argparse.Namespace) -> dict[str, str]:
    devices = (
        {} if options.smoke else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first_gpu, first_gpu + row.gpus)))}
    )
    threads = "1" if options.smoke else str(max((os.cpu_count() or 8) // 8, 1))
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path, **devices}


def line(found: dict[str, Any], row: Row, *, smoke: bool) -> str:
    """A row of the table."""
    peer = None if smoke else PEERS.get(row.peer or row.name)
    theirs = ("—", "—", "—") if peer is None else (f"{peer.tokens_per_s:,.0f}", "", f"{peer.gib:.1f}")
    if "error" in found:
        reason = found["error"].strip().splitlines()[-1] if found["error"].strip() else "no output"
        cells = [row.name, str(row.gpus), "failed", reason[:120], "", "", *theirs]
    else:
        ratio = "—" if peer is None else f"{found['tokens_per_s'] / peer.tokens_per_s:.3f}"
        cells = [
            row.name,
            str(row.gpus),
            f"{found['tokens_per_s']:,.0f}",
            f"{found['tflops']:.1f}",
            f"{100 * found['mfu']:.1f}",
            f"{found['gib']:.1f}",
            theirs[0],
            ratio,
            theirs[2],
        ]
    return f"| {' | '.join(cells)} |"


def about(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the facts needed to repeat a table."""
    measured = next((each for each in found if "error" not in each), {"device": "nothing", "torch": "?"})
    today = datetime.datetime.now(datetime.UTC).date()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{options.gpus} × {measured['device']}, Python {platform.python_version()}, torch {measured['torch']}, "
        f"commit {commit.stdout.strip() or 'unknown'}, {today}, {options.steps} steps. "
        f"Peer: {PEER_NAME}; a ratio above 1 means that Trivet is faster."
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rows", default="", help=f"comma-separated; of {', '.join(ROWS)}")
    parser.add_argument("--vary", action="append", default=[], metavar="ROW:field=value,…")
    parser.add_argument("--profile", default="", metavar="ROW,…", help="rows to profile after they were measured")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one row")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    options.steps = 4 if options.smoke else options.steps
    options.warmup = min(10, options.steps // 2)
    return options


def chosen(options: argparse.Namespace) -> list[Row]:
    names = [name for name in (options.rows or options.profile).split(",") if name] + options.vary
    rows = [row for row in map(varied, names or ROWS) if row.gpus <= options.gpus]
    return sorted(rows, key=lambda row: row.gpus)


def main() -> None:
    options = arguments()
    began, results = time.perf_counter(), []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for wave in waves(chosen(options), options.gpus):
        if time.perf_counter() - began > options.budget:
            print(f"out of time before {', '.join(row.name for row, _ in wave)}", flush=True)
            continue
        with ThreadPoolExecutor(len(wave)) as pool:
            found = list(pool.map(lambda each: run(*each, options), wave))
        for (row, _), each in zip(wave, found, strict=True):
            results.append(each)
            print(line(each, row, smoke=options.smoke), flush=True)
            report(each, options)
    print(about(results, options))


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """All results that the table leaves out."""
    if options.json is not None:
        with options.json.open("a") as out:
            out.write(json.dumps(found) + "\n")
    if "error" in found:
        print(found["error"], file=sys.stderr, flush=True)
    if "profile" in found:
        print(found["profile"], flush=True)


if __name__ == "__main__":
    main()
