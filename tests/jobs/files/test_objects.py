"""Files go through an object store whole, checked by their hash, and have no name before all of them is there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import object_server

from service.jobs.files import DataLayout, Folder
from service.jobs.files.objects import (
    ObjectStore,
    ObjectStoreError,
    RemoteFile,
    StoredObject,
    TreeManifest,
    fetch_upload,
    newest_state,
    put_upload,
    state_tree,
)


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with object_server() as url:
        yield ObjectStore(url)


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(f"memory://{request.node.name}")


def put(
    store: ObjectStore, folder: Path, content: bytes, owner: str = "jobs/one", tree: str = "published"
) -> RemoteFile:
    path = folder / "content"
    path.write_bytes(content)
    with path.open("rb") as file:
        return store.file(owner, store.put(owner, tree, file))


def test_what_is_put_over_http_is_found_in_part_and_whole_and_removed(s3: ObjectStore, tmp_path: Path) -> None:
    s3.try_out()
    content = b"0123456789" * 840_000  # two chunks
    file = put(s3, tmp_path, content)
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert b"".join(file.chunks()) == content
    assert b"".join(file.chunks(8_388_600, 8_388_620)) == content[8_388_600:8_388_620]
    with Folder.open(tmp_path) as folder:
        s3.fetch(file, folder, "below/here")
    assert (tmp_path / "below/here").read_bytes() == content
    for attempt, owner in ((1, "jobs/one"), (12, "jobs/one")):
        stored = StoredObject(path="published/x", sha256=file.sha256, bytes=attempt)
        s3.name_files(owner, state_tree(attempt), TreeManifest(host="a", files={"x": stored}))
    found = newest_state(s3, "one")
    assert found is not None
    assert found[0] == 12
    s3.remove("jobs/one")
    assert newest_state(s3, "one") is None
    with pytest.raises(FileNotFoundError):
        s3.read(file.path)


def test_other_bytes_than_were_put_there_are_refused(memory: ObjectStore, tmp_path: Path) -> None:
    file = put(memory, tmp_path, b"good")
    memory._write(file.path, b"evil")
    with pytest.raises(ObjectStoreError, match="SHA-256"), Folder.open(tmp_path) as folder:
        memory.fetch(file, folder, "here")
    memory._write(file.path, b"go")
    with pytest.raises(ObjectStoreError, match="shorter"):
        list(file.chunks())
    assert [path.name for path in tmp_path.iterdir()] == ["content"]


def test_a_tree_has_what_its_manifest_names_and_loses_the_rest(memory: ObjectStore, tmp_path: Path) -> None:
    tree = state_tree(1)
    one, two = (put(memory, tmp_path, content, tree=tree) for content in (b"one", b"two"))
    assert memory.manifest("jobs/one", tree) is None
    names = {"one": one, "two": two}
    stored = {name: StoredObject(path=f"{tree}/{f.sha256}", sha256=f.sha256, bytes=3) for name, f in names.items()}
    memory.name_files("jobs/one", tree, TreeManifest(files=stored))
    memory.name_files("jobs/one", tree, TreeManifest(files={"two": stored["two"]}))
    manifest = memory.manifest("jobs/one", tree)
    assert manifest is not None
    assert memory.tree("jobs/one", manifest).files == {"two": two}
    with pytest.raises(FileNotFoundError):
        memory.read(one.path)


def test_an_upload_is_fetched_by_its_id_and_checked(memory: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "upload").write_bytes(b"weights")
    with (tmp_path / "upload").open("rb") as file:
        put_upload(memory, file)
    file_id = f"file_{hashlib.sha256(b'weights').hexdigest()}"
    data = DataLayout(tmp_path / "data")
    fetch_upload(memory, data, file_id)
    assert data.file(file_id).read_bytes() == b"weights"


def test_a_store_that_cannot_be_used_says_what_to_change() -> None:
    with pytest.raises(ObjectStoreError, match=r"TRIVET_STORE=nope://x .*trivet\[store\]"):
        ObjectStore("nope://x").try_out()
