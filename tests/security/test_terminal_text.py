"""Text of other users in a terminal: it is shown, it never acts, and no command fails over it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import pytest
import typer.core
import typer.main
from digits import digits_job
from hostile_service import Hostile, hostile_service
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lanes import examples, first_fast
from onnx_models import model, node
from rich.text import Text
from typer.testing import CliRunner

from service.jobs.kinds.registry import spec_adapter
from service.jobs.settings import Settings
from service.jobs.submission.check import check_names
from service.jobs.text import first_control, visible, visible_json
from service.jobs.text.safe_text import SafeFormatter
from trivet.cli.context import job_ids
from trivet.cli.main import program
from trivet.terminal import Terminal, paragraph

ACTING = {
    *map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F)]),
    *map(chr, [*range(0x2066, 0x2070), 0xD800, 0xDC80, 0xDFFF]),
} - {"\t"}
MARKUP = [
    "\\[/nosuch]", "[/]", "[/bold]", "[bold", "[link=http://x]y[/link]", ":smile:", "{task}", "{}", "%s", "\\", "\\[",
    "\x1b]0;owned\x07", "\x1b[2J", "\x9b5n", "a\nsucceeded", "\u202egnp.exe", "\ud800", "<b>",
]  # fmt: skip
ALL_AT_ONCE = " ".join([*MARKUP, *sorted(ACTING)])
TEXTS = st.one_of(
    st.sampled_from(MARKUP),
    st.lists(st.sampled_from([*ACTING, "[", "]", "/", "\\", "{", "}", "a", " ", "é", "漢"]), max_size=12).map("".join),
    st.lists(st.sampled_from(MARKUP), min_size=1, max_size=3).map("".join),
)
APP = program()
COMMANDS: dict[str, list[list[str]]] = {
    "submit": [
        ["submit", "SPEC"], ["submit", "SPEC", "--watch"], ["submit", "SPEC", "--watch", "--json"],
        ["submit", "SPEC", "SPEC"], ["submit", "SPEC", "SPEC", "--json"], ["submit", "SPEC", "SPEC", "--watch"],
    ],
    "validate": [["validate", "SPEC"], ["validate", "SPEC", "--json"]],
    "watch": [["watch", "J"], ["watch", "J", "--json"]],
    "jobs": [["jobs"], ["jobs", "--json"], ["jobs", "--csv"]],
    "compare": [["compare", "J", "sweep"], ["compare", "J", "--json"], ["compare", "J", "--csv"]],
    "show": [["show", "J"], ["show", "J", "--json"], ["show", "sweep"], ["show", "sweep", "--json"]],
    "cancel": [["cancel", "J"], ["cancel", "J", "--json"], ["cancel", "J", "K", "--json"]],
    "retry": [["retry", "J"], ["retry", "J", "--json"]],
    "delete": [["delete", "J", "--yes"]],
    "logs": [["logs", "J"], ["logs", "J", "--json"], ["logs", "J", "-f"], ["logs", "J", "-f", "--json"]],
    "metrics": [["metrics", "J"], ["metrics", "J", "--json"], ["metrics", "J", "n"], ["metrics", "J", "--csv"]],
    "bounds": [["bounds", "J"], ["bounds", "J", "--json"], ["bounds", "J", "--csv"]],
    "report": [["report", "J"], ["report", "J", "--json"]],
    "schedule": [["schedule", "J"], ["schedule", "J", "--json"]],
    "artifacts": [["artifacts", "J"], ["artifacts", "J", "--json"], ["artifacts", "J", "n", "-o", "OUT"]],
    "upload": [["upload", "SPEC"], ["upload", "SPEC", "--json"]],
    "kinds": [["kinds"], ["kinds", "--json"]],
    "hosts": [["hosts"], ["hosts", "--json"], ["hosts", "drain", "h"], ["hosts", "resume", "h"]],
    "alerts": [["alerts"], ["alerts", "--all"], ["alerts", "--json"]],
    "keys": [
        ["keys", "create", "n"], ["keys", "create", "n", "--json"], ["keys", "list"], ["keys", "list", "--json"],
        ["keys", "rotate", "k"], ["keys", "rotate", "k", "--json"], ["keys", "revoke", "k"],
    ],
    "queue": [["queue"], ["queue", "--json"], ["queue", "J"]],
    "shares": [["shares"], ["shares", "--json"], ["shares", "weigh", "p", "2"]],
    "share": [["share", "J", "p"], ["share", "J", "p", "--json"], ["share", "J", "p", "--stop"]],
    "projects": [
        ["projects", "list"], ["projects", "list", "--json"], ["projects", "create", "p"], ["projects", "delete", "p"],
        ["projects", "show", "p"], ["projects", "show", "p", "--json"],
        ["projects", "set", "p", "--description", "d"], ["projects", "set", "p", "--quota", "queued_jobs=3", "--json"],
        ["projects", "members", "set", "p", "m", "viewer"], ["projects", "members", "remove", "p", "m"],
        ["projects", "members", "set", "p", "m", "viewer", "--json"],
    ],
    "accounts": [
        ["accounts", "list"], ["accounts", "list", "--json"],
        ["accounts", "create", "n"], ["accounts", "create", "n", "--json"],
        ["accounts", "key", "n"], ["accounts", "key", "n", "--json"],
        ["accounts", "disable", "n"], ["accounts", "enable", "n"], ["accounts", "delete", "n"],
    ],
    "audit": [
        ["audit"], ["audit", "--json"], ["audit", "export"], ["audit", "verify"], ["audit", "verify", "--json"],
    ],
    "uploads": [["uploads"], ["uploads", "--json"], ["uploads", "delete", "f"]],
    "vnncomp": [
        ["vnncomp", "run", "c", "ONNX", "VNNLIB", "OUT", "60"], ["vnncomp", "prepare", "c", "ONNX", "VNNLIB"],
        ["vnncomp", "score", "BENCHMARK", "--into", "NEW"],
    ],
    "vnnlib": [
        ["vnnlib", "verify", "VNNLIB2", "--network", "NETWORK", "--timeout", "60"], ["vnnlib", "supports", "--x"],
    ],
    "webhooks": [
        ["webhooks", "create", "https://h"], ["webhooks", "create", "https://h", "--json"], ["webhooks", "list"],
        ["webhooks", "list", "--json"], ["webhooks", "deliveries", "w"], ["webhooks", "deliveries", "w", "--json"],
        ["webhooks", "delete", "w"], ["webhooks", "secret"], ["webhooks", "secret", "--json"],
    ],
}  # fmt: skip
LOCAL = {"up", "demo", "api", "worker", "settings", "doctor", "init", "broker", "backup", "restore"}
"""Commands that ask no service: they start one, keep or write its files, or show this user's own settings and machine.
"""
ONE_LINE_A_NAME = [
    ["jobs"], ["show", "J"], ["show", "sweep"], ["watch", "J"], ["hosts"], ["keys", "list"], ["queue"], ["shares"],
    ["share", "J", "p"], ["projects", "list"], ["projects", "show", "p"], ["accounts", "list"], ["audit"], ["uploads"],
    ["webhooks", "list"], ["webhooks", "deliveries", "w"], ["metrics", "J", "n"],
]  # fmt: skip
WORDLESS = [
    ["delete", "J", "--yes"], ["artifacts", "J", "n", "-o", "OUT"], ["keys", "revoke", "k"],
    ["shares", "weigh", "p", "2"], ["projects", "delete", "p"], ["projects", "members", "remove", "p", "m"],
    ["accounts", "delete", "n"], ["audit", "verify"], ["audit", "verify", "--json"], ["uploads", "delete", "f"],
    ["webhooks", "delete", "w"], ["vnncomp", "prepare", "c", "ONNX", "VNNLIB"],
    ["vnnlib", "supports", "--x"],
]  # fmt: skip
"""Of the commands above, those that repeat no word of the service's unless it refuses them."""


@pytest.fixture(scope="module")
def service() -> Iterator[Hostile]:
    with hostile_service() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _commands_and_settings_are_made_once() -> Iterator[None]:
    """By a process that runs many, all for one service: making them takes longer than most commands."""
    settings = cache(Settings)
    with (
        patch("typer.testing._get_command", cache(typer.main.get_command)),
        patch("trivet.connection.Settings", settings),
        patch("trivet.endpoint.Settings", settings),
    ):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("specs")
    (made / "spec.yaml").write_text("kind: train\n")
    (made / "net.onnx").touch()
    declared = "(declare-const X_0 Real)(declare-const Y_0 Real)"
    (made / "query.vnnlib").write_text(f"{declared}(assert (<= X_0 1))(assert (>= X_0 0))(assert (>= Y_0 0))")
    declared = "(declare-network f (declare-input X real [1]) (declare-output Y real [1]))"
    asserted = "(assert (and (<= X[0] 1) (>= X[0] 0) (>= Y[0] 0)))"
    (made / "query2.vnnlib").write_text(f"(vnnlib-version <2.0>){declared}{asserted}")
    (made / "relu.onnx").write_bytes(model([node("Relu", ["x"])], [1]))
    (made / "instances.csv").write_text("net.onnx,query.vnnlib,60\n")
    return made


def run(service: Hostile, folder: Path, words: list[str], **environment: str) -> str:
    """Both outputs of a command, which may refuse but not break."""
    files = {"SPEC": str(folder / "spec.yaml"), "OUT": str(folder / "out"), "BENCHMARK": str(folder)}
    files |= {"ONNX": str(folder / "net.onnx"), "VNNLIB": str(folder / "query.vnnlib"), "NEW": mkdtemp(dir=folder)}
    files |= {"VNNLIB2": str(folder / "query2.vnnlib"), "NETWORK": f"f={folder / 'relu.onnx'}"}
    variables = {"TRIVET_URL": service.url, "TRIVET_KEY": "tvt_x_y", "TRIVET_DATA": str(folder / "data"), **environment}
    result = CliRunner().invoke(APP, [files.get(word, word) for word in words], env=variables)
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
    assert result.exit_code in (0, 1, 2), (words, result.output)
    return result.output


def test_every_command_is_tried(service: Hostile) -> None:
    group = typer.main.get_command(APP)
    assert isinstance(group, typer.core.TyperGroup)
    assert set(group.commands) == COMMANDS.keys() | LOCAL
    for name, variants in COMMANDS.items():
        assert {" ".join(path) for path in _paths(group.commands[name], [name])} == {
            " ".join(_path(group.commands[name], words)) for words in variants
        }


def _paths(command: object, path: list[str]) -> Iterator[list[str]]:
    """Yield the words of a command that runs, and of each below it."""
    group = isinstance(command, typer.core.TyperGroup)
    if not group or command.invoke_without_command:
        yield path
    if group:
        for name, each in command.commands.items():
            yield from _paths(each, [*path, name])


def _path(command: object, words: list[str]) -> list[str]:
    """Return those of the words that name the command."""
    first, *rest = words
    if isinstance(command, typer.core.TyperGroup) and rest and rest[0] in command.commands:
        return [first, *_path(command.commands[rest[0]], rest)]
    return [first]


EVERY_VARIANT = pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=[pytest.mark.slow] if number else [])
        for variants in COMMANDS.values()
        for number, words in enumerate(variants)
    ],
    ids=" ".join,
)


@EVERY_VARIANT
def test_every_command_gets_to_say_what_the_service_says(service: Hostile, folder: Path, words: list[str]) -> None:
    service.text, service.refusal = "chosen-text", None
    assert ("chosen-text" in run(service, folder, words)) == (words not in WORDLESS)


@EVERY_VARIANT
@example(text=ALL_AT_ONCE, refusal=None)
@example(text=ALL_AT_ONCE, refusal=422)
@given(text=TEXTS, refusal=st.sampled_from([None, None, 401, 409, 422, 500]))
@settings(max_examples=examples(1, 3), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_command_lets_text_act_or_fails_over_it(
    service: Hostile, folder: Path, words: list[str], text: str, refusal: int | None
) -> None:
    service.text, service.refusal = text, refusal
    shown = run(service, folder, words)
    assert not (ACTING - {"\n"}) & set(shown)


@pytest.mark.parametrize("words", first_fast(1, [["watch", "J"], ["jobs"], ["show", "J"], ["logs", "J"]]), ids=" ".join)
@pytest.mark.parametrize(
    "text", first_fast(3, ["\x1b]0;owned\x07", "\u202eabc", "[/]", "\x9b2J", "\x1b[6n", "\\[/nosuch]"])
)
def test_nor_in_a_terminal(service: Hostile, folder: Path, words: list[str], text: str) -> None:
    service.text, service.refusal = text, None
    shown = run(service, folder, words, FORCE_COLOR="1", TERM="xterm")
    assert text not in shown or visible(text) == text
    assert visible(text)[:4] in shown


def test_what_is_shown_is_the_text_itself(service: Hostile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.cli.context.out._width", 4000)  # tests side by side have the width of a terminal
    service.text, service.refusal = "\\[/nosuch] [bold]x\x1b[31m\x9b\u202e\n:smile:", None
    shown = run(service, folder, ["jobs"])
    assert "\\[/nosuch] [bold]x\\x1b[31m\\x9b\\u202e\\n:smile:" in shown
    assert len(shown.splitlines()) == 2


@pytest.mark.slow
def test_a_line_feed_in_a_name_starts_no_line_at_the_margin(service: Hostile, folder: Path) -> None:
    service.text, service.refusal = "a\nstate: succeeded", None
    for words in ONE_LINE_A_NAME:
        assert not any(line.startswith("state: succeeded") for line in run(service, folder, words).splitlines()), words


@pytest.mark.parametrize("separator", first_fast(2, ["\u2028", "\r", "\x85", "\x0b", "\x1e"]))
def test_only_a_line_feed_ends_a_printed_line(service: Hostile, folder: Path, separator: str) -> None:
    service.text, service.refusal = f"one{separator}two", None
    for words in (["logs", "J"], ["logs", "J", "--json"], ["audit", "export"]):
        assert len(run(service, folder, words).splitlines()) == 1, words


def test_lines_of_json_read_back_as_they_were(service: Hostile, folder: Path) -> None:
    service.text, service.refusal = "\x7f\x9b2J\u202e\n\x1b", None
    assert json.loads(run(service, folder, ["logs", "J", "--json"]))["line"] == service.text
    assert json.loads(run(service, folder, ["audit", "export"]))["detail"] == {service.text: service.text}


@pytest.mark.parametrize("text", first_fast(2, ["\x1b]0;owned\x07", "[/]", "\x9b2J", "\u202eabc"]))
def test_nor_does_the_time_at_which_a_key_expires(
    service: Hostile, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "key_expires", text.encode().decode("latin-1"))
    service.text, service.refusal = "x", None
    shown = run(service, folder, ["jobs"])
    assert f"the API key expires at {visible(text)};" in shown
    assert not (ACTING - {"\n"}) & set(shown)


def test_text_that_cannot_be_sent_is_refused_in_words(service: Hostile, folder: Path) -> None:
    service.text, service.refusal = "x", None
    for words in (["show", "\udcff"], ["jobs", "-q", "\udcff"]):
        assert "UTF-8" in run(service, folder, words), words


def test_colours_of_printed_lines_are_left_out(service: Hostile, folder: Path) -> None:
    service.text, service.refusal = "\x1b[1;31mred\x1b[0m \x1b[2Jcleared", None
    assert run(service, folder, ["logs", "J"]) == "red \\x1b[2Jcleared\n"
    assert "[rank 0] red \\x1b[2Jcleared\n" in run(service, folder, ["logs", "J", "-f"])


@pytest.mark.parametrize("text", ["\x1b]0;owned\x07", "\x9b2J", "a\nb", "x"])
def test_an_id_that_would_act_is_not_offered_to_a_shell(
    service: Hostile, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_URL", service.url)
    monkeypatch.setenv("TRIVET_KEY", "tvt_x_y")
    service.text, service.refusal = text, None
    assert [offered for offered, _ in job_ids("")] == ([text] if text == visible(text) else [])


@pytest.mark.parametrize("text", ["\x1b]0;owned\x07", "\x9b2J", "\u202eabc", "a\nstate: succeeded", "\udcff"])
@pytest.mark.parametrize("place", ["member", "manifest", "manifest's member", "format"])
def test_what_a_backup_of_somebody_says_does_not_act(
    service: Hostile, folder: Path, tmp_path: Path, text: str, place: str
) -> None:
    manifest: Any = {"format": 1, "members": {}}
    name = "data/jobs/x"
    if place == "member":
        name = f"data/{text}"
    elif place == "manifest":
        manifest = text
    elif place == "format":
        manifest["format"] = text
    else:
        manifest["members"] = {text: text}
    with tarfile.open(tmp_path / "backup.tar", "w") as tar:
        for member, content in ((name, b"x"), ("manifest.json", json.dumps(manifest).encode())):
            header = tarfile.TarInfo(member)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    told = run(service, folder, ["restore", str(tmp_path / "backup.tar")], TRIVET_DATA=str(tmp_path / "data"))
    assert any(words in told for words in ("is no backup", "is no member", "is damaged"))
    assert not (ACTING - {"\n"}) & set(told)
    assert all(line.startswith("  ") for line in told.splitlines()[1:])


def test_an_encoding_without_a_character_ends_no_command(service: Hostile, folder: Path) -> None:
    service.text, service.refusal = "漢 ≈", None
    environment = {
        **os.environ, "TRIVET_URL": service.url, "TRIVET_KEY": "tvt_x_y", "PYTHONIOENCODING": "ascii", "COLUMNS": "200",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "trivet", "jobs"], env=environment, cwd=folder, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"\\u6f22" in ran.stdout


@given(value=st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=10))
def test_json_for_a_terminal_reads_back_as_it_was(value: Any) -> None:
    told = visible_json(value)
    assert not (ACTING - {"\n"}) & set(told)
    assert json.loads(told) == json.loads(json.dumps(value))


@given(text=TEXTS)
def test_text_that_comes_as_a_rendered_object_does_not_act_either(text: str) -> None:
    terminal = Terminal(file=io.StringIO(), width=500)
    terminal.print(Text(text), Text.assemble(text, (text, "bold")), paragraph(text), text)
    assert isinstance(terminal.file, io.StringIO)
    assert not (ACTING - {"\n"}) & set(terminal.file.getvalue())


@given(text=TEXTS)
def test_a_log_record_is_one_record_whatever_it_holds(text: str) -> None:
    error = ValueError(text)
    record = logging.LogRecord("api", logging.ERROR, "f", 1, "failed: %s", (text,), (type(error), error, None))
    told = SafeFormatter("2026-01-01 %(levelname)s %(message)s").format(record)
    assert not (ACTING - {"\n"}) & set(told)
    first, *rest = told.split("\n")
    assert first.startswith("2026-01-01 ERROR failed: ")
    assert all(line.startswith("  ") for line in rest)


SPEC = digits_job()


@given(text=TEXTS.filter(lambda text: not any("\ud800" <= letter <= "\udfff" for letter in text)))
def test_a_name_or_label_with_a_control_character_is_refused_at_submit(text: str) -> None:
    spec = spec_adapter.validate_python({**SPEC, "name": text, "labels": {"team": text}})
    refused = [problem.path for problem in check_names(spec)]
    assert refused == (["name", "labels.team"] if (ACTING | {"\t"}) & set(text) else [])
    assert (first_control(text) is None) == (not refused)
