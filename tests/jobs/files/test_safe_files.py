"""Files are opened as they are, not as a rank makes them seem."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually

from service.jobs.files import Folder, UnsafePathError, remove_tree, safe_files

HUSH = b"hush"


@pytest.fixture(params=["openat2", "a walk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A folder with a file, beside a secret; opened by one call, and step by step as on older kernels."""
    if request.param == "a walk":
        monkeypatch.setattr(safe_files, "_has_openat2", lambda: False)
    elif not safe_files._has_openat2():
        pytest.skip("this kernel or container has no openat2")
    (tmp_path / "secret").write_bytes(HUSH)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(HUSH)
    (tmp_path / "job" / "deep").mkdir(parents=True)
    (tmp_path / "job" / "deep" / "file").write_bytes(b"mine")
    with Folder.open(tmp_path / "job") as folder:
        yield folder


def lay_link(job: Path) -> str:
    (job / "name").symlink_to(job.parent / "secret")
    return "name"


def lay_link_inside(job: Path) -> str:
    (job / "name").symlink_to("deep/file")
    return "name"


def lay_link_in_the_way(job: Path) -> str:
    (job / "name").symlink_to(job.parent / "outside")
    return "name/secret"


def lay_pipe(job: Path) -> str:
    os.mkfifo(job / "name")
    return "name"


def lay_nothing_and_climb(job: Path) -> str:
    return "../secret"


def lay_nothing_and_name_all(job: Path) -> str:
    return str(job.parent / "secret")


LAID = [
    lay_link,
    lay_link_inside,
    lay_link_in_the_way,
    lay_pipe,
    lay_nothing_and_climb,
    lay_nothing_and_name_all,
]


@pytest.mark.parametrize("lay", LAID)
def test_nothing_but_a_regular_file_below_is_opened(folder: Folder, lay: Callable[[Path], str]) -> None:
    name = lay(folder.path)
    for act in (folder.reader, folder.append, folder.create, lambda name: folder.read(name, 100)):
        with pytest.raises(OSError, match=r"name|secret"):
            act(name)
    with pytest.raises(UnsafePathError):
        folder.reader(name)
    assert (folder.path.parent / "secret").read_bytes() == HUSH


def test_folders_are_not_reached_through_links(folder: Folder) -> None:
    (folder.path / "name").symlink_to(folder.path.parent / "outside")
    for act in (folder.folder, folder.make, folder.handle, lambda name: folder.write(f"{name}/new", b"")):
        with pytest.raises(UnsafePathError, match=r"a link.*name"):
            act("name")
    assert [path.name for path in (folder.path.parent / "outside").iterdir()] == ["secret"]
    with pytest.raises(UnsafePathError, match="a link"):
        Folder.open(folder.path / "name")


def test_a_file_that_flips_between_itself_and_a_link_is_never_the_other_one(folder: Folder) -> None:
    over = threading.Event()

    def flip() -> None:
        os.chdir(folder.path)
        while not over.is_set():
            Path("x").symlink_to("../secret")
            Path("x").replace("name")
            Path("x").write_bytes(b"mine")
            Path("x").replace("name")

    before = Path.cwd()
    flipping = threading.Thread(target=flip)
    flipping.start()
    found, refused = 0, 0
    try:
        while found < 20 or refused < 20:
            try:
                assert folder.read("name", 100) in (b"mine", b"")
                found += 1
            except FileNotFoundError:
                pass
            except UnsafePathError:
                refused += 1
    finally:
        over.set()
        flipping.join()
        os.chdir(before)


def test_what_is_written_is_whole_and_takes_the_place_of_a_link(folder: Folder) -> None:
    lay_link(folder.path)
    folder.write("name", b"new")
    assert folder.read("name", 3) == b"new"
    assert (folder.path.parent / "secret").read_bytes() == HUSH
    folder.write("deep/file", b"newer")
    assert folder.read("deep/file", 100) == b"newer"
    with pytest.raises(UnsafePathError, match="more than 4 bytes"):
        folder.read("deep/file", 4)
    assert [each.name for each in folder.files()] == ["deep/file", "name"], "no draft is left"


def test_a_file_with_a_second_name_is_not_written_to(folder: Folder) -> None:
    os.link(folder.path.parent / "secret", folder.path / "name")
    with pytest.raises(UnsafePathError, match="other names"):
        folder.append("name")


def test_an_open_file_gets_a_name_whatever_has_its_old_one(folder: Folder) -> None:
    with folder.reader("deep/file") as file, folder.make("kept") as kept:
        (folder.path / "deep" / "file").rename(folder.path / "elsewhere")
        (folder.path / "deep" / "file").symlink_to(folder.path.parent / "secret")
        kept.link(file, "mine")
        assert kept.read("mine", 100) == b"mine"


def test_listings_hold_regular_files_only(folder: Folder) -> None:
    lay_link(folder.path)
    os.mkfifo(folder.path / "deep" / "pipe")
    (folder.path / "deep" / "out").symlink_to(folder.path.parent / "outside")
    (folder.path / "deep" / "deeper").mkdir()
    (folder.path / "deep" / "deeper" / "file").write_bytes(b"12345")
    listed = {each.name: each.status.st_size for each in folder.files("job/")}
    assert listed == {"job/deep/deeper/file": 5, "job/deep/file": 4}


def test_a_folder_that_cannot_be_listed_hides_no_other(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.path / "a" / "b").mkdir(parents=True)
    (folder.path / "z").write_bytes(b"")
    names = Folder.names

    def stale(self: Folder) -> list[str]:
        if self.path.name == "b":
            raise OSError(errno.ESTALE, "removed by another host")
        return names(self)

    monkeypatch.setattr(Folder, "names", stale)
    assert [entry.name for entry in folder.files()] == ["deep/file", "z"]


def test_trees_are_removed_however_deep_and_closed_they_are(folder: Folder) -> None:
    """Deeper than Python calls itself, and than a path may be long; folders without rights; links, which stay whole."""
    before = Path.cwd()
    os.chdir(folder.path / "deep")
    for _ in range(1500):
        Path("below").mkdir()
        os.chdir("below")
    os.chdir(before)
    (folder.path / "deep" / "closed" / "within").mkdir(parents=True)
    (folder.path / "deep" / "closed").chmod(0)
    (folder.path / "deep" / "out").symlink_to(folder.path.parent / "outside")
    remove_tree(folder.path)
    assert not folder.path.exists()
    assert (folder.path.parent / "outside" / "secret").read_bytes() == HUSH
    remove_tree(folder.path)
    folder.remove("missing")


def test_descriptors_are_given_back(folder: Folder) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    for name in (lay_link(folder.path), "deep/file", "missing", "../secret"):
        for act in (folder.reader, folder.folder, folder.read):
            try:
                found = act(name) if act != folder.read else folder.read(name, 9)
                getattr(found, "close", lambda: None)()
            except OSError:
                pass
    folder.make("a/b/c").close()
    remove_tree(folder.path / "a")
    assert list(folder.files())
    eventually(lambda: held() == before)


def test_files_are_made_for_the_user_alone_under_a_strict_umask(folder: Folder) -> None:
    os.umask(0o077)
    folder.create("new").close()
    folder.make("folder").close()
    assert stat.S_IMODE((folder.path / "new").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder.path / "folder").stat().st_mode) == 0o700
