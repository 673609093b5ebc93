"""Runs every case of a folder through services of its own, and compares their answers with the right ones.

    python benchmarks/cases.py CASES [NAME …] [--parts verification …] [--seconds 60] [--rigorous] [--out FILE]

A part is a folder of CASES, and all of them run unless some are named:

``verification/NAME`` and ``real-models/NAME`` have a model, perhaps with the files of its weights, and queries;
``expected.txt`` has a line ``QUERY: VERDICT  note`` for those with a verdict, and finite bounds are asked for else.
``training/NAME`` has scripts against a service, which are judged by what they print, files of specs, and archives of
weights, which must be refused or succeed.
``compile`` is a package of programs: a faulty one must not pass the rung that ``expected/NAME.txt`` names.
``security`` has a kind of job that runs code, and scripts that try to escape its isolation. A line is printed
for each case: the expected answer, the given one, whether it is right, and the seconds; a case that cannot run
here is skipped, with the reason. ``--out`` adds it to a file as a row of Markdown at once. Exit 1 if one is wrong.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import cases_compile
import cases_security
import cases_training
import cases_verification
from case_rows import COLUMNS, Row, skipped
from ending import end_by_signals

Part = Callable[[argparse.Namespace], Iterator[Row]]


def _queries(part: str) -> Part:
    return lambda given: cases_verification.run(
        given.cases, part, given.names, cases_verification.Options(given.seconds, given.rigorous)
    )


PARTS: Mapping[str, Part] = {
    "verification": _queries("verification"),
    "real-models": _queries("real-models"),
    "training": lambda given: cases_training.run(given.cases, given.names, given.limit),
    "compile": lambda given: cases_compile.run(given.cases, given.names, given.device),
    "security": lambda given: cases_security.run(given.cases, given.names, given.limit),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("names", nargs="*", help="only these folders, inputs, programs and scripts")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=60.0, help="the budget of a query")
    parser.add_argument("--rigorous", action="store_true")
    parser.add_argument("--device", default="cpu", help="of compile checks")
    parser.add_argument("--limit", type=float, default=600.0, help="the seconds of a script")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    end_by_signals()
    counts: Counter[str] = Counter()
    if given.out is not None and not given.out.exists():
        given.out.write_text(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for part in given.parts:
        there = (given.cases / part).is_dir()
        for row in PARTS[part](given) if there else [skipped(part, "", "there is no such folder")]:
            counts[row.judgement] += 1
            print(row, flush=True)
            if given.out is not None:
                with given.out.open("a") as out:
                    out.write(row.markdown() + "\n")
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
