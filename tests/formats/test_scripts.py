"""Archives of scripts: which are refused, and that nothing is made of them."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from archives import zipped

from service.formats import script as scripts
from service.formats.archive import MOST_MEMBERS, ArchiveError
from service.formats.script import check_script, unpack_script
from trivet.packing import PackError, pack_folder


def tarred(name: str = "train.py", kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, link
        archive.addfile(entry)
    return made.getvalue()


def zip_link() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        entry = zipfile.ZipInfo("train.py")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    return made.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tarred("train.py", tarfile.SYMTYPE, "/etc/passwd"), "'train.py' is a link"),
        (tarred("train.py", tarfile.LNKTYPE, "other"), "'train.py' is a link"),
        (tarred("train.py", tarfile.FIFOTYPE), "'train.py' is a link, a device"),
        (zip_link(), "'train.py' is a link"),
        (tarred("../train.py"), "'../train.py' leads out"),
        (tarred("/train.py"), "'/train.py' leads out"),
        (zipped({"a/../../train.py": b""}), "leads out"),
        (zipped({"train.py": b"", "train.py/x": b""}), "'train.py' is a file and a folder"),
        (zipped({"x" * 256: b""}), "is no name of a file"),
        (
            zipped({"src/train.py": b"", "notes.txt": b""}),
            "the archive has no train.py; its Python files are src/train.py",
        ),
        (zipped({str(number): b"" for number in range(MOST_MEMBERS + 1)}), f"more than {MOST_MEMBERS} members"),
        (zipped({"train.py": b"0" * 2000}), "its files have 2000 bytes; expected at most 1000"),
        (b"print('a script alone')", "expected a zip or an uncompressed tar of a script and its files"),
    ],
)
def test_an_archive_that_no_rank_could_take_is_refused_and_nothing_is_made(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "LARGEST_SCRIPT", 1000)
    archive, folder = tmp_path / "archive", tmp_path / "script"
    archive.write_bytes(content)
    with pytest.raises(ArchiveError, match=said.replace(".", r"\.")):
        check_script(archive, "train.py")
    if "has no" not in said:
        with pytest.raises(ArchiveError):
            unpack_script(archive, folder)
        assert not folder.exists()
    assert sorted(tmp_path.iterdir()) == sorted({archive, *tmp_path.glob("script")})


def test_a_packed_folder_is_unpacked_as_it_was_but_for_what_is_hidden(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name in ("train.py", "lib/net.py", ".git/config", "lib/__pycache__/net.pyc", ".env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    packed = [tmp_path / "one.zip", tmp_path / "two.zip"]
    for path in packed:
        with path.open("wb") as file:
            pack_folder(folder, file)
    assert packed[0].read_bytes() == packed[1].read_bytes()
    check_script(packed[0], "train.py")
    unpack_script(packed[0], tmp_path / "there")
    there = {str(path.relative_to(tmp_path / "there")): path.read_text() for path in (tmp_path / "there").rglob("*.py")}
    assert there == {"train.py": "train.py", "lib/net.py": "lib/net.py"}
    assert len(list((tmp_path / "there").rglob("*"))) == 3


def test_a_folder_with_a_link_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data").symlink_to("/etc")
    with pytest.raises(PackError, match=r"mine/data is a link"):
        pack_folder(tmp_path / "mine", io.BytesIO())
