"""An API key goes to the service that it was given for, and to nothing else that listens or is written down."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_listener import NOBODY, SECRET, Listener, ask, listening, needs_root

from service.jobs.settings import Settings
from trivet.client import Client
from trivet.endpoint import MisdirectedKey, resolve, same_service
from trivet.errors import TrivetError, Unreachable

pytestmark = pytest.mark.usefixtures("folder")


def test_whatever_listens_on_the_port_is_not_sent_the_admin_key(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listener.url.rpartition(":")[2]
    monkeypatch.setenv("TRIVET_PORT", port)
    with pytest.raises(Unreachable, match=r"\.trivet/api\.sock"):
        ask()
    monkeypatch.setenv("TRIVET_URL", listener.url)
    ask()
    ask(listener.url)
    assert set(listener.keys) == {""}


@pytest.mark.parametrize("own", [pytest.param(True, marks=pytest.mark.slow), False], ids=["admin key", "no admin key"])
def test_a_key_in_the_environment_without_a_url_is_sent_to_the_data_folders_socket_only(
    listener: Listener, folder: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    if not own:
        (folder / ".trivet" / "admin.key").unlink()
    monkeypatch.setenv("TRIVET_PORT", listener.url.rpartition(":")[2])
    monkeypatch.setenv("TRIVET_KEY", SECRET)
    with pytest.raises(Unreachable):
        ask()
    assert listener.keys == []


def test_a_file_in_the_working_folder_redirects_no_key_from_elsewhere(
    listener: Listener, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "trivet.toml").write_text(f'url = "{listener.url}"\n')
    ask()
    assert listener.keys == [""], "the admin key of the data folder stays"
    monkeypatch.setenv("TRIVET_KEY", SECRET)
    with pytest.raises(MisdirectedKey, match=r"TRIVET_KEY was not sent to http.*trivet\.toml: set TRIVET_URL and"):
        ask()
    with pytest.raises(MisdirectedKey, match="argument 'key'"):
        ask(key=SECRET)
    assert listener.keys == [""]


def test_a_file_with_both_names_a_service_and_its_key(listener: Listener, folder: Path) -> None:
    (folder / "trivet.toml").write_text(f'url = "{listener.url}"\nkey = "tvt_of_the_file"\n')
    ask()
    assert listener.keys == ["Bearer tvt_of_the_file"]


def test_the_key_of_such_a_file_goes_to_no_other_url(
    listener: Listener, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "trivet.toml").write_text('url = "http://127.0.0.1:9"\nkey = "tvt_of_the_file"\n')
    monkeypatch.setenv("TRIVET_URL", listener.url)
    with pytest.raises(MisdirectedKey, match=r"which is for http://127\.0\.0\.1:9 was not sent"):
        ask()
    (folder / "trivet.toml").write_text(f'url = "{listener.url}/"\nkey = "tvt_of_the_file"\n')
    ask()
    monkeypatch.delenv("TRIVET_URL")
    (folder / "trivet.toml").write_text('key = "tvt_of_the_file"\n')
    with pytest.raises(MisdirectedKey, match="has a key and no url"):
        ask()
    assert listener.keys == ["Bearer tvt_of_the_file"]


def test_both_from_the_environment_are_the_users_own_choice(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_URL", listener.url)
    monkeypatch.setenv("TRIVET_KEY", SECRET)
    ask()
    with listening() as other, pytest.raises(MisdirectedKey):
        ask(other.url)
    assert listener.keys == [f"Bearer {SECRET}"]


def test_a_file_that_is_named_is_a_choice_too(
    listener: Listener, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "trivet.toml").write_text(f'url = "{listener.url}"\n')
    monkeypatch.setenv("TRIVET_CONFIG", "trivet.toml")
    monkeypatch.setenv("TRIVET_KEY", SECRET)
    ask()
    assert listener.keys == [f"Bearer {SECRET}"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(listener: Listener, status: int) -> None:
    with listening() as other:
        listener.status, listener.headers = status, {"Location": f"{other.url}/v1/jobs"}
        for call in (lambda: ask(listener.url, SECRET), lambda: list(Client(listener.url, SECRET).logs("job_x"))):
            with pytest.raises(TrivetError, match="not followed"):
                call()
        assert other.keys == []


def test_a_proxy_of_the_environment_does_not_see_what_is_asked_of_this_machine(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        ask(listener.url, SECRET)
        assert (proxy.keys, listener.keys) == ([], [f"Bearer {SECRET}"])


def test_a_key_with_characters_that_none_has_is_refused_without_being_shown(listener: Listener) -> None:
    with pytest.raises(TrivetError, match="characters") as refused:
        ask(listener.url, "tvt_x\nX-Other: y")
    assert "tvt_x" not in str(refused.value)


@needs_root
@pytest.mark.parametrize("change", ["owner", "writable"])
def test_a_file_that_somebody_else_put_there_is_not_read(folder: Path, change: str) -> None:
    path = folder / "trivet.toml"
    path.write_text('host = "0.0.0.0"\nbehind_proxy = true\n')
    if change == "owner":
        os.chown(path, NOBODY, NOBODY)
    else:
        path.chmod(0o666)
    with pytest.raises(PermissionError, match=r"trivet\.toml .*TRIVET_CONFIG"):
        Settings()
    path.unlink()
    (folder / "mine.toml").write_text("port = 1\n")
    path.symlink_to("mine.toml")
    assert Settings().port == 1
    if change == "owner":
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(PermissionError, match="belongs to user"):
            Settings()


def test_the_command_says_so_and_exits_2(folder: Path) -> None:
    (folder / "trivet.toml").write_text("port = 1\n")
    (folder / "trivet.toml").chmod(0o666)
    ran = subprocess.run([sys.executable, "-m", "trivet", "jobs"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "may be written by every user" in ran.stderr
    assert "Traceback" not in ran.stderr


@needs_root
def test_a_key_goes_to_no_socket_in_a_folder_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(folder / ".trivet" / "api.sock"))
        trap.listen()
        trap.settimeout(0)
        os.chown(folder / ".trivet", NOBODY, NOBODY)
        monkeypatch.setenv("TRIVET_KEY", SECRET)
        with pytest.raises(MisdirectedKey, match="belongs to"):
            ask()
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.slow
def test_a_key_goes_to_no_socket_in_a_folder_open_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (None, SECRET):
        if key is not None:
            monkeypatch.setenv("TRIVET_KEY", key)
        (folder / ".trivet").chmod(0o770)
        with pytest.raises(MisdirectedKey, match="chmod go-w"):
            ask()
        (folder / ".trivet").chmod(0o700)
        with pytest.raises(Unreachable):
            ask()


@needs_root
def test_root_is_not_shown_to_another_key_by_a_link_in_a_users_folder(folder: Path) -> None:
    data = folder / ".trivet"
    (folder / "of_root").write_text(SECRET)
    (data / "admin.key").unlink()
    (data / "admin.key").symlink_to(folder / "of_root")
    os.chown(data, NOBODY, NOBODY)
    assert resolve(None, None).key is None
    (data / "admin.key").unlink()
    shutil.copy(folder / "of_root", data / "admin.key")
    assert resolve(None, None).key is None, "a file of root in it is not the folder's own"
    os.chown(data / "admin.key", NOBODY, NOBODY)
    assert resolve(None, None).key == SECRET


def test_a_found_file_does_not_say_whom_to_trust_for_another_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "trivet.toml").write_text('ca_cert = "evil.pem"\n')
    monkeypatch.setenv("TRIVET_URL", "https://example.org")
    monkeypatch.setenv("TRIVET_KEY", SECRET)
    assert resolve(None, None).ca_cert is None
    monkeypatch.setenv("TRIVET_CA_CERT", "good.pem")
    assert resolve(None, None).ca_cert == Path("good.pem")


URLS = ["http://127.0.0.1:1", "http://localhost:1", "http://127.0.0.1:2", "https://a.example", "unix:///x/api.sock"]


SOURCES = ("argument", "environment", "file")  # the first that names one is asked


@given(
    urls=st.fixed_dictionaries({where: st.sampled_from([None, *URLS]) for where in SOURCES}),
    keys=st.fixed_dictionaries({where: st.booleans() for where in SOURCES}),
    named=st.booleans(),
)
def test_whatever_is_chosen_where_a_key_meets_its_own_url_or_none_that_was_only_found(
    tmp_path_factory: pytest.TempPathFactory, urls: dict[str, str | None], keys: dict[str, bool], named: bool
) -> None:
    here = tmp_path_factory.mktemp("chosen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        lines = [f'url = "{urls["file"]}"'] if urls["file"] else []
        lines += ['key = "tvt_file"'] if keys["file"] else []
        (here / "trivet.toml").write_text("\n".join(lines))
        if named:
            patch.setenv("TRIVET_CONFIG", "trivet.toml")
        if urls["environment"]:
            patch.setenv("TRIVET_URL", urls["environment"])
        if keys["environment"]:
            patch.setenv("TRIVET_KEY", "tvt_environment")
        try:
            found = resolve(urls["argument"], "tvt_argument" if keys["argument"] else None)
        except MisdirectedKey:
            return
    if found.key is None:
        return
    source = found.key.removeprefix("tvt_")
    used_from = next((where for where in SOURCES if urls[where]), "socket")
    assert used_from == "socket" or found.url == urls[used_from]
    beside = urls[source]
    if beside is not None and source != "argument":
        assert same_service(beside, found.url), "a key with a url beside it goes there"
    if not named and (source == "file") != (used_from == "file"):
        assert used_from == "socket" or (beside is not None and same_service(beside, found.url))
        assert source != "file" or used_from != "socket"
