"""What ranks make of uploaded files is kept within a limit."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from unittest.mock import patch

from service.jobs.files import OF_OWNER, trim, used
from service.jobs.files.cache import ABANDONED_S, IN_USE_S

HOUR = 3600.0


def entry(path: Path, hours: float, size: int = 100) -> Path:
    """A folder with a file in it, last used so many hours ago."""
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"0" * size)
    at = time.time() - hours * HOUR
    os.utime(path, (at, at))
    return path


def test_the_longest_unused_go_first_and_what_a_job_may_be_opening_stays(tmp_path: Path) -> None:
    oldest, old = entry(tmp_path / "onnx-1" / "a", 9), entry(tmp_path / "huggingface" / "b", 5)
    again = entry(tmp_path / "onnx-1" / "c", 8)
    new = entry(tmp_path / "onnx-1" / "d", 0.5 * IN_USE_S / HOUR)
    used(again)
    assert trim(tmp_path, 400) == []
    assert trim(tmp_path, 300) == [oldest]
    assert trim(tmp_path, 0) == [old]
    assert sorted(tmp_path.glob("*/*")) == sorted([again, new])


def test_what_owners_have_apart_is_within_the_same_limit(tmp_path: Path) -> None:
    ann, ben = (entry(tmp_path / f"{OF_OWNER}{owner}" / "onnx-1" / "a", hours) for owner, hours in (("a", 5), ("b", 9)))
    shared = entry(tmp_path / "onnx-1" / "a", 7)
    assert trim(tmp_path, 200) == [ben]
    assert trim(tmp_path, 0) == [shared, ann]


def test_what_owners_compiled_is_within_a_limit_whatever_their_folders_are_called(tmp_path: Path) -> None:
    old, new = entry(tmp_path / "a1" / "inductor" / "xy", 9), entry(tmp_path / "b2" / "triton" / "KERNEL", 5)
    assert trim(tmp_path, 100) == []
    assert trim(tmp_path, 100, of_owners=True) == [old]
    assert trim(tmp_path, 0, of_owners=True) == [new]


def test_nothing_is_deleted_behind_a_link_that_a_rank_has_laid(tmp_path: Path) -> None:
    """Neither in the place of one of the cache's folders, nor of an entry."""
    theirs = entry(tmp_path / "home" / ".ssh", 100)
    other = entry(tmp_path / "home" / "work", 100)
    cache = tmp_path / "cache"
    laid = entry(cache / "onnx-1" / "a", 9)
    (cache / "home").symlink_to(tmp_path / "home")
    (cache / "onnx-1" / ".making-z").symlink_to(theirs)
    assert trim(cache, 0) == [laid]
    (tmp_path / "link").symlink_to(cache)
    assert trim(tmp_path / "link", 0) == []
    for each in (theirs, other):
        assert (each / "weights").exists()


def test_a_cache_that_is_another_users_is_left_alone(tmp_path: Path) -> None:
    with patch.object(os, "open", side_effect=PermissionError(errno.EACCES, "Permission denied")):
        assert trim(tmp_path, 0) == []


def test_what_was_never_finished_is_cleared_away_after_a_day(tmp_path: Path) -> None:
    dead = entry(tmp_path / "onnx-1" / ".making-x", 1.5 * ABANDONED_S / HOUR)
    made = entry(tmp_path / "onnx-1" / ".making-y", 2)
    assert trim(tmp_path, 0) == []
    assert not dead.exists()
    assert made.exists()
    assert trim(tmp_path / "nowhere", 0) == []
