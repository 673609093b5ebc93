"""Files that appear in one piece, and what killed writers leave of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.jobs.files import atomic_draft, atomic_write


def test_a_small_file_is_replaced_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    atomic_write(path, b"first")
    with path.open("rb") as reader:
        atomic_write(path, b"second")
        assert reader.read() == b"first"
    assert path.read_bytes() == b"second"
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_large_file_is_written_over_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cache.bin"
    with atomic_draft(path) as draft:
        draft.write_bytes(b"first")
    (path.parent / ".cache.bin").write_bytes(b"of a writer that was killed")
    with path.open("rb") as reader:
        with atomic_draft(path) as draft:
            draft.write_bytes(b"second")
        assert reader.read() == b"first"
    assert path.read_bytes() == b"second"
    assert [each.name for each in path.parent.iterdir()] == ["cache.bin"]


def test_a_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "huggingface"
    for name in ("old", "new"):
        with atomic_draft(path) as draft:
            draft.mkdir()
            (draft / name).touch()
    assert [each.name for each in path.iterdir()] == ["new"]
    assert [each.name for each in tmp_path.iterdir()] == ["huggingface"]


def test_what_fails_half_way_does_not_appear(tmp_path: Path) -> None:
    path = tmp_path / "bounds.parquet"

    def fail_half_way() -> None:
        with atomic_draft(path) as draft:
            draft.write_bytes(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail_half_way()
    assert not path.exists()
