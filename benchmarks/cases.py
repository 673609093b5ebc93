"""Submit every verification case of a folder through a service of its own, and hold verdicts against the right ones.

    python benchmarks/cases.py CASES [NAME …] [--seconds 60] [--rigorous]

``CASES/verification/NAME`` has ``model.onnx``, ``*.vnnlib`` and an ``expected.txt`` with a line for each of them,
``QUERY: VERDICT  note``; ``CASES/real-models/NAME`` has a model, perhaps with the files of its weights, and queries
whose bounds are asked for: a row's bounds, or the refusal, are shown, and nothing is judged.
``CASES/training/NAME/run.py`` runs against the service as it is; its exit status and last line are shown. Exit 1 on a
wrong verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos_service import Service

from trivet import Client, Refused

LINE = re.compile(r"([\w.-]+): (verified|falsified|refused)\b\s*(.*)")
IN_DOUBT = "unknown without rigorous is no fault"


@dataclass(frozen=True)
class Row:
    """A query of a case: what is right, and what the service said of it."""

    case: str
    query: str
    expected: str
    note: str
    said: str
    detail: str = ""

    @property
    def judgement(self) -> str:
        decided = {"verified", "falsified"}
        if self.expected not in {*decided, "refused"}:
            return "-"
        if self.said == self.expected:
            return "right"
        if self.said in decided and self.expected in decided:
            return "WRONG"
        return "no fault" if self.said in {"unknown", "timeout"} and IN_DOUBT in self.note else "undecided"

    def __str__(self) -> str:
        shown = f"{self.case:32} {self.query:20} {self.expected:10} {self.said:10} {self.judgement:10}"
        return f"{shown} {self.detail}"


def asked(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each query with its verdict and a note; those that the text does not name have none."""
    known = {found[1]: (found[2], found[3]) for found in map(LINE.match, lines(folder)) if found}
    for path in sorted(folder.glob("*.vnnlib")):
        yield path.stem, *known.get(path.stem, ("", ""))


def lines(folder: Path) -> list[str]:
    return (folder / "expected.txt").read_text().splitlines()


def model_of(client: Client, folder: Path) -> str:
    """Upload the model, as a zip where its weights are in other files."""
    beside = [path for path in folder.iterdir() if path.name.endswith(".data")]
    if not beside:
        return client.upload(folder / "model.onnx").id
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / "model.zip"
        with zipfile.ZipFile(packed, "w") as archive:
            for path in (folder / "model.onnx", *beside):
                archive.write(path, path.name)
        return client.upload(packed).id


def decide(client: Client, folder: Path, query: str, given: argparse.Namespace) -> tuple[str, str]:
    """Return the verdict of a query, or that it was refused or failed, and more about it."""
    try:
        files = {"model": {"onnx": model_of(client, folder)}}
        files["property"] = {"vnnlib": client.upload(folder / f"{query}.vnnlib").id}
        search = {"method": "beta-crown", "rigorous": given.rigorous, "budget": {"seconds": given.seconds}}
        job = client.submit({"kind": "verify", "name": f"{folder.name} {query}", "device": "cpu", **files, **search})
    except Refused as error:
        return "refused", str(error).splitlines()[-1][:160]
    done = client.wait(job.id)
    rows = list(client.bounds(job.id))
    if done.state != "succeeded" or not rows:
        return "failed", str(done.error)[:160]
    row = rows[0]
    widths = [high - low for low, high in zip(row["lower"], row["upper"], strict=True) if numbers(low, high)]
    bounded = f"width {max(widths):.4g}" if widths and len(widths) == len(row["lower"]) else "bounds not finite"
    return row["verdict"], f"{row['seconds']:.2f} s, {row['domains']} domains, {bounded}; {row['reason'] or ''}"


def numbers(*ends: object) -> bool:
    return all(isinstance(end, int | float) for end in ends)


def training(cases: Path, service: Service, names: list[str]) -> Iterator[str]:
    """Run each script of the training cases beside its files, in a copy; yield a line about it."""
    for script in sorted((cases / "training").glob("*/run.py")):
        name = script.parent.name
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "training"
            subprocess.run(["cp", "-rL", str(cases / "training"), str(copy)], check=True)
            root = Path(__file__).resolve().parent.parent
            for path in copy.rglob("*.py"):
                text = path.read_text().replace('"TRIVET"', repr(str(root))).replace("CASES", str(copy))
                path.write_text(text.replace("SCRATCH", scratch))
            environment = {"TRIVET_DATA": str(service.data), "TRIVET_PORT": str(service.port), "PATH": "/usr/bin:/bin"}
            done = subprocess.run(
                [sys.executable, "run.py"],
                check=False,
                cwd=copy / name,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            yield f"{name:32} exit {done.returncode}  {''.join(last)[:120]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rigorous", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["verification", "real-models"])
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        service = Service(Path(scratch) / "data", {})
        service.start()
        try:
            with contextlib.closing(service.client()) as client:
                for kind in ("verification", "real-models"):
                    folders = sorted((given.cases / kind).iterdir()) if kind in given.kinds else []
                    for folder in (each for each in folders if not given.names or each.name in given.names):
                        for query, expected, note in asked(folder):
                            said, detail = decide(client, folder, query, given)
                            rows.append(Row(folder.name, query, expected, note, said, detail))
                            print(rows[-1], flush=True)
            if "training" in given.kinds:
                for line in training(given.cases, service, given.names):
                    print(line, flush=True)
        finally:
            service.stop()
    counts = Counter(row.judgement for row in rows)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
