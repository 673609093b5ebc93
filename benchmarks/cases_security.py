"""Runs the security cases of ``cases.py``: scripts that try to escape a rank's isolation through a kind of job that
runs code.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from case_rows import Ran, Row, python, rewritten, run_script, running
from chaos_service import Service

PART = "security"
LEAKS: Mapping[str, str] = {
    "fifo_as_log.py": r"s3cr3t-json|'running'|'starting'|'pending'",
    "folders_of_a_named_job.py": r"READ admin\.key|BROKER b",
    "links_that_the_supervisor_follows.py": r"written by a confined rank|^line B|direct write OK|^\['",
    "published_race.py": r"LEAK after",
}
"""A script's output if something escaped, or did not end."""
TOLD: Mapping[str, str] = {
    "upload_id_in_a_name.py": r"READ .*BLUE-SECRET|accepted\?!",
    "line_without_an_end.py": r"timed out|peak RSS MiB [1-9]\d{3,}",
    "retry_past_the_quota.py": r"^(?:prio|timeout|batch|sweep)[^(]*\(20[01]|(?:usage|queued now) (?:[4-9]|\d\d+) of 3"
    r"|accepted (?:[4-9]|\d\d)|usage (?:[3-9]\d{6}|\d{8,})$",
}
"""The same of scripts that are told the service by their environment, after the keys that ``projects.py`` makes."""
REFUSAL = re.compile(r"^AssertionError: \(4\d\d, ", re.MULTILINE)
"""The end of a script whose job is refused at submit."""


def run(cases: Path, names: list[str], limit: float) -> Iterator[Row]:
    """Yield a row for each script, or for the named ones."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for path in (cases / "security").glob("*.py"):
            shutil.copyfile(path, copy / path.name)
        plugin = copy / "plugin"
        shutil.copytree(cases / "security" / "plugin", plugin, copy_function=shutil.copyfile)
        with running({"PYTHONPATH": str(plugin)}) as service:
            for name in ("evil", "main"):
                (copy / f"{name}.dir").write_text(str(service.data))
            (copy / "mallory.key").write_text(_key(service))
            told = copy / "told"
            told.mkdir()
            for name in ("rest.py", "projects.py", *TOLD):
                (copy / name).rename(told / name)
            rewritten(copy, {"SCRATCH": scratch, "8701": str(service.port), "8704": str(service.port)})
            for script, leak in LEAKS.items():
                if not names or script in names:
                    yield _judged(script, leak, run_script(python(script), copy, service, limit))
            told_by = {"SCRATCH": scratch, "DATA": str(service.data)}
            if not names or TOLD.keys() & set(names):
                run_script(python("projects.py"), told, service, limit, told_by)
            for script, leak in TOLD.items():
                if not names or script in names:
                    yield _judged(script, leak, run_script(python(script), told, service, limit, told_by))


def _judged(script: str, leak: str, ran: Ran) -> Row:
    found = re.search(leak, ran.output, re.MULTILINE)
    is_refused = ran.status == 0 or REFUSAL.search(ran.output) is not None
    wrong = found[0] if found else "" if is_refused else f"exit {ran.status}: {ran.last}"
    said, word = ("otherwise", "WRONG") if wrong else ("nothing", "right")
    return Row(PART, script, "", "nothing gets out", said, word, ran.seconds, wrong or ran.last)


def _key(service: Service) -> str:
    """Return the secret of a new key that may submit."""
    body = json.dumps({"name": "mallory", "scopes": ["read", "submit"]}).encode()
    headers = {"Authorization": f"Bearer {service.key_file.read_text().strip()}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{service.port}/v1/keys", body, headers)
    with urllib.request.urlopen(request) as answer:
        made = json.loads(answer.read())
    return next(value for value in made.values() if isinstance(value, str) and value.startswith("tvt_"))
