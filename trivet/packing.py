"""Packs the folder of a script into one file, to be uploaded."""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from service.formats.archive import MOST_MEMBERS
from service.formats.script import LARGEST_SCRIPT

_LEFT_OUT = "__pycache__"


class PackError(OSError):
    """A folder holds what no script's archive may."""


def pack_folder(folder: Path, target: IO[bytes]) -> None:
    """Write a zip of a folder's files, but for hidden ones and caches of Python; the same files give the same bytes.

    Raises :class:`PackError` for a link, a device, and too many or too large files, before it writes any.
    """
    files = list(_files(folder))
    if not files:
        raise PackError(f"{folder} holds no file to upload: hidden ones are left out")
    if (size := sum(path.stat().st_size for path in files)) > LARGEST_SCRIPT:
        raise PackError(f"the files in {folder} have {size} bytes; expected at most {LARGEST_SCRIPT}")
    with zipfile.ZipFile(target, "w") as zipped:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            with path.open("rb") as source, zipped.open(entry, "w", force_zip64=True) as inner:
                shutil.copyfileobj(source, inner, 2**20)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, in order. Raises :class:`PackError` at the first that is none."""
    found = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (name.startswith(".") or name == _LEFT_OUT))
        for path in (Path(place) / name for name in sorted([*names, *folders]) if not name.startswith(".")):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise PackError(f"{path} is a link or a device; expected regular files and folders")
            if path.is_file():
                found += 1
                yield path
            if found > MOST_MEMBERS:
                raise PackError(f"{folder} holds more than {MOST_MEMBERS} files; expected a script and what it reads")
