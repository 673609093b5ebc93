"""Reads folders of benchmarks: ``instances.csv`` with a network, a query and seconds in each row, gzipped or not."""

from __future__ import annotations

import ast
import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trivet.errors import TrivetError

INSTANCES, LABELS = "instances.csv", "labels.csv"
_YEAR, _VERSION = re.compile(r"\d{4}_"), re.compile(r"\d+\.\d+")


class BenchmarkError(TrivetError):
    """A folder of benchmarks, or a file that it names, cannot be used; the message names the file and the line."""


def there(path: Path) -> Path:
    """Return the file, or the one with ``.gz`` at its end if only that exists. Raises :class:`BenchmarkError`."""
    packed = path.with_name(f"{path.name}.gz")
    found = next((each for each in (path, packed) if each.is_file()), None)
    if found is None:
        raise BenchmarkError(f"there is no file {path}, and no {packed.name} beside it")
    return found


def content(path: Path) -> bytes:
    """Return what :func:`there` finds, unpacked. Raises :class:`BenchmarkError`."""
    return unpacked(there(path))


def unpacked(found: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends with ``.gz``. Raises :class:`BenchmarkError`."""
    try:
        return gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise BenchmarkError(f"cannot read {found}: {error}") from error


@dataclass(frozen=True)
class BenchmarkInstance:
    """A row of a benchmark. ``onnx`` and ``vnnlib`` are as in the row, ``folder`` is where they are."""

    category: str
    folder: Path
    onnx: str
    vnnlib: str
    limit_s: float

    @property
    def networks(self) -> dict[str | None, Path]:
        return {name: self.folder / path for name, path in networks_in(self.onnx).items()}

    @property
    def files(self) -> tuple[dict[str | None, Path], Path]:
        return self.networks, self.folder / self.vnnlib

    @property
    def key(self) -> tuple[str, str, str]:
        return key_of(self.category, self.onnx, self.vnnlib)

    @property
    def witness_name(self) -> str:
        """Return the name of its witness's file: the competition's, with the folders of files in front."""
        vnnlib, named = PurePosixPath(self.key[2]).with_suffix(""), [each for each in networks_in(self.onnx) if each]
        folders = [part for part in vnnlib.parts[:-1] if part != "vnnlib"]
        network = "_".join(named) or PurePosixPath(self.key[1]).with_suffix("").name
        return "_".join([*folders, network, vnnlib.name]) + ".counterexample.gz"


def networks_in(cell: str) -> dict[str | None, str]:
    """Return the networks of an instance: a path, or the competition's list ``[('f', 'a.onnx'), …]`` by name. Raises
    :class:`BenchmarkError`.
    """
    if not cell.startswith("["):
        return {None: cell}
    try:
        pairs = [(str(name), str(path)) for name, path in ast.literal_eval(cell)]
    except (ValueError, SyntaxError, TypeError):
        pairs = []
    found: dict[str | None, str] = dict(pairs)
    if not found or len(found) < len(pairs):
        raise BenchmarkError(f"got {cell[:200]!r}, expected a network or [('NAME', 'NETWORK'), …], each name once")
    return found


def key_of(category: str, onnx: str, vnnlib: str) -> tuple[str, str, str]:
    """Return what names an instance in results of any tool, wherever its files lay: a category without its year, and
    the paths of all files from the folders ``onnx`` and ``vnnlib`` on.
    """
    return _YEAR.sub("", category, count=1), _networks_inner(onnx), _inner(vnnlib, "vnnlib")


def _networks_inner(cell: str) -> str:
    try:
        found = networks_in(cell)
    except BenchmarkError:  # another tool's spelling, which names no instance
        return cell
    parts = ((name, _inner(path, "onnx")) for name, path in found.items())
    return ",".join(path if name is None else f"{name}={path}" for name, path in parts)


def _inner(path: str, folder: str) -> str:
    parts = PurePosixPath(path.removesuffix(".gz")).parts
    inside = [index for index, part in enumerate(parts) if part == folder]
    return str(PurePosixPath(*parts[inside[-1] :])) if inside else parts[-1]


def instances(folder: Path) -> list[BenchmarkInstance]:
    """Return the rows of all benchmarks in a folder, which may be one itself, by category. Raises
    :class:`BenchmarkError`.

    A benchmark may have a folder for each version of VNN-LIB, with the same instances: its first version counts.
    Results could not tell instances of one key apart: these are refused, too.
    """
    lists = sorted(folder.rglob(INSTANCES))
    lists = list({_category(path.parent, folder): path for path in reversed(lists)}.values())[::-1]
    if not lists:
        raise BenchmarkError(f"{folder} has no {INSTANCES}, and no folder in it has one")
    found = [instance for path in lists for instance in _rows(path, _category(path.parent, folder))]
    known = dict[tuple[str, str, str], BenchmarkInstance]()
    for each in found:
        if (other := known.setdefault(each.key, each)).files != each.files:
            raise BenchmarkError(
                f"{each.folder / INSTANCES}: results name {each.onnx},{each.vnnlib} as they name "
                f"{other.onnx},{other.vnnlib} of {other.folder}: {','.join(each.key)}; expected other names, or "
                "folders onnx and vnnlib around the files"
            )
    return found


def _category(home: Path, folder: Path) -> str:
    home = home.parent if _VERSION.fullmatch(home.name) else home
    inner = home.relative_to(folder).as_posix() if home.is_relative_to(folder) else "."
    return home.resolve().name if inner == "." else inner


def _rows(path: Path, category: str) -> Iterator[BenchmarkInstance]:
    for line, row in _read(path):
        cells = [each.strip() for each in row]
        limit = _seconds(cells[2]) if len(cells) == 3 else None
        if limit is None or not all(cells):
            raise BenchmarkError(f"{path} line {line}: got {','.join(row)[:200]!r}, expected ONNX,VNNLIB,SECONDS")
        try:
            networks_in(cells[0])
        except BenchmarkError as error:
            raise BenchmarkError(f"{path} line {line}: {error}") from error
        yield BenchmarkInstance(category, path.parent, cells[0], cells[1], limit)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _read(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            yield from ((reader.line_num, row) for row in reader if any(each.strip() for each in row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchmarkError(f"cannot read {path}: {error}") from error


def labels(every: list[BenchmarkInstance]) -> dict[tuple[str, str, str], str]:
    """Return the known answers, ``sat`` or ``unsat``: column ``label`` of ``labels.csv`` beside each list, with the
    columns ``onnx`` and ``vnnlib`` of instances.
    """
    found = {}
    for folder, category in {(each.folder, each.category) for each in every if (each.folder / LABELS).is_file()}:
        rows = [row for _, row in _read(folder / LABELS)]
        for row in rows[1:]:
            cells = dict(zip(rows[0], row, strict=False))
            if not {"onnx", "vnnlib", "label"} <= set(cells):
                raise BenchmarkError(f"{folder / LABELS}: got {','.join(rows[0])!r}, expected onnx, vnnlib and label")
            if cells["label"] in ("sat", "unsat"):
                found[key_of(category, cells["onnx"], cells["vnnlib"])] = cells["label"]
    return found
