"""Queries in uploaded files: a text, a text that gzip compressed, or an archive of either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from service.formats.archive import ArchiveError, ArchiveMember, Unpacking, UploadError, is_archive, opened
from service.formats.vnnlib.query import VnnlibError

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
    if is_archive(path):
        try:
            with opened(path, "*.vnnlib or *.vnnlib.gz files") as members:
                return list(_within(members, Unpacking(path.stat().st_size)))
        except ArchiveError as error:
            raise VnnlibError(str(error)) from error
    with path.open("rb") as content:
        return [Source("", read_text(content, "the file", Unpacking(path.stat().st_size)))]


def _within(members: list[ArchiveMember], unpacking: Unpacking) -> Iterator[Source]:
    queries = sorted((each for each in members if each.name.endswith(SUFFIXES)), key=lambda each: str(each.path))
    if not queries:
        raise VnnlibError(f"the archive of {len(members)} files has none that ends in {' or '.join(SUFFIXES)}")
    left = LARGEST
    for member in queries:
        with member.open() as content:
            text = read_text(content, str(member.path), unpacking, left)
        left -= len(text)
        yield Source(str(member.path), text)


def read_text(content: IO[bytes], name: str, unpacking: Unpacking, most: int = LARGEST) -> str:
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
