"""Measures the lengths of files, functions and paths through the sources, of one commit or of several side by side.

    python benchmarks/house.py [COMMIT …]

Without a commit, the working tree is measured. Sources are ``service``, ``workers``, ``api`` and ``trivet``. Public
names are the functions and classes of modules that do not begin with an underscore, without methods. A function
is of one statement if its body, after the docstring, is one statement that holds no other: ``if``, ``for``, ``with``,
``try`` and nested functions are more. A helper is used once if its name stands in one place of its file beside its
definition; its lines are those of the definition. A class has the name of another even if one of them begins with an
underscore. Nothing is asserted; the table is printed.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("service", "workers", "api", "trivet")
SHORT_FILE, LONG_FILE, SHORT_HELPER = 100, 400, 3
Function = ast.FunctionDef | ast.AsyncFunctionDef
SIMPLE = ast.Return | ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Raise | ast.Delete | ast.Assert
WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class File:
    """One source file."""

    path: Path
    text: str

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


@dataclass(frozen=True)
class House:
    """All sources of one commit, parsed once."""

    files: tuple[File, ...]
    tests: tuple[File, ...]

    @classmethod
    def of(cls, folder: Path) -> House:
        return cls(_files(folder, *ROOMS), _files(folder, "tests"))

    @property
    def functions(self) -> list[Function]:
        return [node for file in self.files for node in ast.walk(file.tree) if isinstance(node, Function)]


def _files(folder: Path, *rooms: str) -> tuple[File, ...]:
    paths = sorted(path for room in rooms for path in (folder / room).rglob("*.py") if "." not in path.parent.name)
    return tuple(File(path.relative_to(folder), path.read_text()) for path in paths)


def class_names_used_twice(house: House) -> int:
    classes = (node for file in house.files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef))
    names = Counter(each.name.lstrip("_") for each in classes)
    return sum(count > 1 for count in names.values())


def _public(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body)


def public_names_with_methods(house: House) -> int:
    return sum(len(list(_public(file.tree.body))) for file in house.files)


def public_names(house: House) -> int:
    named = (node for file in house.files for node in file.tree.body if isinstance(node, Function | ast.ClassDef))
    return sum(not node.name.startswith("_") for node in named)


def lines_per_public_name(house: House) -> float:
    return round(sum(file.lines for file in house.files) / public_names(house), 1)


def _statements(function: Function) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[1:] if has_docstring else function.body


def one_statement_functions(house: House) -> str:
    functions = house.functions
    return f"{sum(_is_one_statement(each) for each in functions) / len(functions):.1%}"


def _is_one_statement(function: Function) -> bool:
    statements = _statements(function)
    return len(statements) == 1 and isinstance(statements[0], SIMPLE)


def _helpers_used_once(house: House) -> Iterator[Function]:
    for file in house.files:
        uses = Counter(WORDS.findall(file.text))
        functions = [node for node in ast.walk(file.tree) if isinstance(node, Function)]
        private = [each for each in functions if each.name.startswith("_") and not each.name.startswith("__")]
        yield from (each for each in private if uses[each.name] == 2)


def helpers_used_once(house: House) -> int:
    return len(list(_helpers_used_once(house)))


def short_helpers_used_once(house: House) -> int:
    return sum((each.end_lineno or 0) - each.lineno < SHORT_HELPER for each in _helpers_used_once(house))


MEASURES: dict[str, Callable[[House], object]] = {
    "lines of sources": lambda house: sum(file.lines for file in house.files),
    "files": lambda house: len(house.files),
    f"files under {SHORT_FILE} lines": lambda house: sum(file.lines < SHORT_FILE for file in house.files),
    f"files over {LONG_FILE} lines": lambda house: sum(file.lines > LONG_FILE for file in house.files),
    "lines of the median file": lambda house: statistics.median(file.lines for file in house.files),
    "public names": public_names,
    "lines for each public name": lines_per_public_name,
    "public names with those of methods": public_names_with_methods,
    "class names used twice": class_names_used_twice,
    "functions of one statement": one_statement_functions,
    "private helpers used once": helpers_used_once,
    f"of these, of at most {SHORT_HELPER} lines": short_helpers_used_once,
    "lines of tests": lambda house: sum(file.lines for file in house.tests),
    f"test files over {LONG_FILE} lines": lambda house: sum(file.lines > LONG_FILE for file in house.tests),
}


def house_at(commit: str) -> House:
    """Read the sources of a commit, which is not checked out.

    :raises subprocess.CalledProcessError: for a commit that git does not know.
    """
    packed = subprocess.run(["git", "archive", commit, *ROOMS, "tests"], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return House.of(Path(folder))


def main(commits: list[str]) -> None:
    houses = [house_at(commit) for commit in commits] or [House.of(ROOT)]
    print(f"| | {' | '.join(commits or ['working tree'])} |\n|---|{'--:|' * len(houses)}")
    for name, measure in MEASURES.items():
        print(f"| {name} | {' | '.join(str(measure(house)) for house in houses)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
