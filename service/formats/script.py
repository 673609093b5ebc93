"""Reads uploaded scripts: archives of Python files, one of which is run.

Its members become files of ranks, so nothing is left out in silence: an archive with a link, or with a path that leads
out of it, is refused as a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from service.formats.archive import ArchiveError, ArchiveMember, first_odd_member, opened

LARGEST_SCRIPT = 2**30
"""The most bytes that a script's files may have together."""
_OF = "a script and its files"
_LONGEST_PART = 255
_SHOWN = 5


def check_script(archive: Path, entry: str) -> None:
    """Raise :class:`ArchiveError` if ranks could not unpack the archive and run its file ``entry``."""
    with _files(archive) as files:
        if entry not in files:
            python = sorted(name for name in files if name.endswith(".py"))
            there = ", ".join(python[:_SHOWN]) + (" and others" if len(python) > _SHOWN else "")
            raise ArchiveError(f"the archive has no {entry}; its Python files are {there or 'none'}")


def unpack_script(archive: Path, folder: Path) -> None:
    """Put the archive's files into the new ``folder``. Raises :class:`ArchiveError` before it makes any."""
    with _files(archive) as files:
        folder.mkdir()
        for name, member in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source, target.open("xb") as file:
                shutil.copyfileobj(source, file, 2**20)


@contextmanager
def _files(archive: Path) -> Iterator[dict[str, ArchiveMember]]:
    """Return the archive's files by path, while it is open. Raises :class:`ArchiveError` unless all can be unpacked."""
    with opened(archive, _OF) as members:
        if (odd := first_odd_member(archive)) is not None:
            raise ArchiveError(f"{odd!r} is a link, a device or a sparse file; expected regular files and folders")
        if (size := sum(member.size for member in members)) > LARGEST_SCRIPT:
            raise ArchiveError(f"its files have {size} bytes; expected at most {LARGEST_SCRIPT}")
        files: dict[str, ArchiveMember] = {}
        for member in members:
            _check_path(member.path)
            if str(member.path) in files:
                raise ArchiveError(f"it has {str(member.path)!r} twice")
            files[str(member.path)] = member
        folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
        if doubled := folders & files.keys():
            raise ArchiveError(f"{min(doubled)!r} is a file and a folder")
        yield files


def _check_path(path: PurePosixPath) -> None:
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ArchiveError(f"{str(path)!r} leads out of the archive; expected paths within it")
    if any(len(part.encode(errors="surrogateescape")) > _LONGEST_PART or not part.isprintable() for part in path.parts):
        raise ArchiveError(f"{str(path)[:100]!r} is no name of a file; expected at most {_LONGEST_PART} readable bytes")
