"""Reads uploaded queries: alone, compressed or in archives with their networks (VNN-COMP's ``instances.csv``)."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import IO

from service.formats.archive import ArchiveError, ArchiveMember, Unpacking, UploadError, damage, opened
from service.formats.vnnlib.query import VnnlibError

INSTANCES = "instances.csv"
_SECONDS = re.compile(r"\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
MOST_PAIRS, LARGEST_MODEL = 10_000, 2**31
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257


class NotThereError(VnnlibError):
    """A row names a file that the archive lacks; the message names the row and the file."""


@dataclass(frozen=True)
class Pair:
    """A row: a model and a query by the names in the row, and seconds of search if it has them."""

    line: int
    model: str
    query: str
    seconds: float | None

    @property
    def name(self) -> str:
        return f"{self.model} {self.query}"


@dataclass(frozen=True, eq=False)
class Bundle:
    """An open archive. Names are relative to the folder of ``instances.csv``; a file may have ``.gz`` at its end.

    All data read from it count towards the limit of its unpacked size.
    """

    pairs: tuple[Pair, ...]
    members: Mapping[PurePosixPath, ArchiveMember]
    unpacking: Unpacking

    def text(self, pair: Pair) -> str:
        """Return the text of a query. Raises :class:`VnnlibError`."""
        return _read_text(io.BytesIO(self._read(pair, pair.query, LARGEST)), pair.query, self.unpacking)

    def model(self, pair: Pair, most: int = LARGEST_MODEL) -> bytes | None:
        """Return the model, unpacked; ``None`` if it has more bytes than that. Raises :class:`VnnlibError`."""
        data = self._read(pair, pair.model, most)
        try:
            data = self.unpacking.read(data, pair.model, most)
        except UploadError as error:
            raise VnnlibError(str(error)) from error
        return None if len(data) > most else data

    def _read(self, pair: Pair, name: str, most: int) -> bytes:
        for path in (PurePosixPath(name), PurePosixPath(f"{name}.gz")):
            if path in self.members:
                return _content(self.members[path], most)
        raise NotThereError(f"{INSTANCES} line {pair.line}: the archive has no {name}, and no {name}.gz, beside it")


@contextmanager
def bundle(path: Path) -> Iterator[Bundle]:
    """Yield the rows and files of an uploaded zip or uncompressed tar. Raises :class:`VnnlibError`."""
    stack = ExitStack()
    try:
        members = stack.enter_context(opened(path, f"{INSTANCES} and the files that it names"))
        lists = [member for member in members if member.name == INSTANCES]
        if not lists:
            raise VnnlibError(f"the archive of {len(members)} files has no {INSTANCES}")
        home = min(lists, key=lambda member: len(member.path.parts))
        unpacking = Unpacking(path.stat().st_size)
        pairs = tuple(_pairs(_read_text(io.BytesIO(_content(home, LARGEST)), INSTANCES, unpacking)))
        folder = home.path.parent
        beside = [each for each in members if each.path.is_relative_to(folder)]
        yield Bundle(pairs, {each.path.relative_to(folder): each for each in beside}, unpacking)
    except ArchiveError as error:
        raise VnnlibError(str(error)) from error
    finally:
        # Errors raised by the code that uses the bundle are not the archive's.
        stack.close()


def _content(member: ArchiveMember, most: int) -> bytes:
    """Return a member's content, no more than one byte beyond ``most``."""
    with damage(), member.open() as content:
        return content.read(most + 1)


def _pairs(text: str) -> Iterator[Pair]:
    rows = [(line, row) for line, row in _rows(text) if any(each.strip() for each in row)]
    if not 0 < len(rows) <= MOST_PAIRS:
        raise VnnlibError(f"{INSTANCES} has {len(rows)} rows; expected 1 to {MOST_PAIRS}")
    for line, row in rows:
        cells = [each.strip() for each in row]
        if len(cells) not in (2, 3) or not all(cells):
            raise VnnlibError(
                f"{INSTANCES} line {line}: got {','.join(row)[:200]!r}, expected MODEL,QUERY or MODEL,QUERY,SECONDS"
            )
        model, query = (str(PurePosixPath(each)) for each in cells[:2])
        yield Pair(line, model, query, _seconds(line, cells[2]) if len(cells) == 3 else None)


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of its last line."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise VnnlibError(f"{INSTANCES} line {reader.line_num}: {error}; expected comma-separated values") from error


def _seconds(line: int, text: str) -> float:
    value = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not isfinite(value) or value <= 0:
        raise VnnlibError(f"{INSTANCES} line {line}: got {text[:60]!r}, expected seconds above 0")
    return value


SUFFIXES = (".vnnlib", ".vnnlib.gz")
LARGEST = 2**26
"""Bytes of text in one file, all members of an archive together."""


@dataclass(frozen=True)
class Source:
    """One query's text. ``name`` is its path in the archive, empty for a file that is no archive."""

    name: str
    text: str


def sources(path: Path) -> list[Source]:
    """Return all queries of an uploaded file; those of an archive by name. Raises :class:`VnnlibError` or
    ``OSError``.
    """
    if _is_archive(path):
        try:
            with opened(path, "*.vnnlib or *.vnnlib.gz files") as members:
                return list(_within(members, Unpacking(path.stat().st_size)))
        except ArchiveError as error:
            raise VnnlibError(str(error)) from error
    with path.open("rb") as content:
        return [Source("", _read_text(content, "the file", Unpacking(path.stat().st_size)))]


def _is_archive(path: Path) -> bool:
    """Return whether the file begins, or ends, like a zip or an uncompressed tar."""
    with path.open("rb") as content:
        content.seek(_TAR_MAGIC_AT)
        return content.read(len(_TAR_MAGIC)) == _TAR_MAGIC or zipfile.is_zipfile(path)


def _within(members: list[ArchiveMember], unpacking: Unpacking) -> Iterator[Source]:
    queries = sorted((each for each in members if each.name.endswith(SUFFIXES)), key=lambda each: str(each.path))
    if not queries:
        raise VnnlibError(f"the archive of {len(members)} files has none that ends in {' or '.join(SUFFIXES)}")
    left = LARGEST
    for member in queries:
        with member.open() as content:
            text = _read_text(content, str(member.path), unpacking, left)
        left -= len(text)
        yield Source(str(member.path), text)


def _read_text(content: IO[bytes], name: str, unpacking: Unpacking, most: int = LARGEST) -> str:
    """Return the text of a file, compressed by gzip or not. Raises :class:`VnnlibError`, also beyond ``most`` bytes."""
    try:
        data = unpacking.read(content.read(most + 1), name, most)
    except UploadError as error:
        raise VnnlibError(str(error)) from error
    if len(data) > most:
        raise VnnlibError(f"{name} goes past {LARGEST} bytes of text, the most that one upload may hold")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise VnnlibError(
            f"{name} is not text (byte {error.start}: {error.reason}); expected VNN-LIB as UTF-8 text, compressed by "
            "gzip or not, or a zip or an uncompressed tar of such files"
        ) from error
