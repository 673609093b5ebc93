"""What is logged: one JSON object a line where that is asked for, with its fields and without secrets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.text import log_fields
from service.jobs.text.logs import JsonFormatter, RedactingFormatter, redacted

KEY = "tvt_0a1b2c_" + "s3cret-" * 4
ROOT = Path(__file__).parents[3]


def record(message: str, *words: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("api", logging.WARNING, __file__, 1, message, words, exc_info)


def test_a_record_is_one_object_with_the_fields_of_process_and_task() -> None:
    formatter = JsonFormatter({"process": "agent", "host": "a"})
    with log_fields(job="job_1", attempt=2), log_fields(request_id="r1"):
        line = formatter.format(record("lost %s\nagain", "a lease"))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "logger": "api",
        "message": "lost a lease\nagain",
        "process": "agent",
        "host": "a",
        "job": "job_1",
        "attempt": 2,
        "request_id": "r1",
    }
    assert "job" not in json.loads(formatter.format(record("later")))


@given(st.text())
def test_whatever_is_logged_stays_on_one_line_and_reads_back(text: str) -> None:
    line = JsonFormatter({}).format(record("%s", text))
    assert line.isprintable()
    if redacted(text) == text:
        assert json.loads(line)["message"] == text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"refused {KEY}", KEY.removeprefix("tvt_")),
        ("no answer from redis://:hunter2@broker:6379/0", "hunter2"),
        ("no answer from rediss://trivet:hunter2@broker:6379/0", "hunter2"),
        ("Authorization: Bearer abcdefghij", "abcdefghij"),
        ("{'authorization': 'Basic YTpiYmJi'}", "YTpiYmJi"),
        ("Cookie: trivet_session=abc.def; other=1", "abc.def"),
        ("__Host-trivet_session=abc.def", "abc.def"),
        ("GET /v1/events?ticket=t0pSecret&x=1", "t0pSecret"),
        ("X-Trivet-Session: page-secret", "page-secret"),
    ],
)
def test_no_secret_is_logged(text: str, secret: str) -> None:
    error = ValueError(text)
    for formatter in (JsonFormatter({}), RedactingFormatter("%(message)s")):
        line = formatter.format(record("%s", text, error=error))
        assert secret not in line
        assert "***" in line


def test_what_is_no_secret_stays() -> None:
    text = "GET /v1/jobs?owner=ada of http://127.0.0.1:8437/v1/jobs, ada@example.org, basic facts"
    assert redacted(text) == text


def test_processes_log_as_they_are_told(tmp_path: Path) -> None:
    """A real process: an API whose broker is away says so in JSON, or in words."""
    variables = {"TRIVET_DATA": str(tmp_path), "TRIVET_LOG_FORMAT": "json", "PYTHONPATH": str(ROOT)}
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
    script = (
        "import logging; from service.jobs.settings import Settings; from service.jobs.text import log_to_stderr; "
        "s = Settings(); log_to_stderr(s.log_level, '%(message)s', s.log_format, process='api'); "
        f"logging.getLogger('x').warning('key %s', {KEY!r})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env=outer | variables, capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(ran.stderr)["process"] == "api"
    assert json.loads(ran.stderr)["message"] == "key tvt_***"
