"""What is imported once for many jobs changes nothing but modules."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from workers.launcher import preloading
from workers.launcher.preloading import what_import_leaves

LEAVES = {
    "threads": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "environment variables": "import os; os.environ['OF_A_PACKAGE'] = '1'",
    "the working folder": "import os; os.chdir('/')",
    "open files": "file = open('/dev/null')",
    "signal handlers": "import signal; signal.signal(signal.SIGUSR2, lambda *_: None)",
    "random numbers": "import random; random.seed(7)",
}


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("what", LEAVES)
def test_modules_that_change_more_than_modules_are_told_apart(what: str, tmp_path: Path) -> None:
    name = f"leaves_{what.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(LEAVES[what])
    assert what_import_leaves([name]) == f"change {what}"
    assert name not in sys.modules


def test_modules_that_end_their_process_or_never_end_their_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloading, "_TRIAL_S", 0.5)
    (tmp_path / "leaves_at_once.py").write_text("import os; os._exit(3)")
    (tmp_path / "crashes.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "never_there.py").write_text("import signal; signal.pause()")
    assert what_import_leaves(["leaves_at_once"]) == "end the process that imports them (exit code 3)"
    assert what_import_leaves(["crashes"]) == f"end the process that imports them (exit code {-signal.SIGSEGV})"
    assert what_import_leaves(["never_there"]) == "take more than 0.5 s to be imported"


def test_modules_that_change_nothing_else_or_cannot_be_imported_are_no_harm(tmp_path: Path) -> None:
    """What is wrong with the latter the ranks say."""
    (tmp_path / "harmless.py").write_text("import json, os\nNUMBERS = list(range(100))\n")
    (tmp_path / "broken_module.py").write_text("raise ValueError('no')")
    before = dict(os.environ)
    assert what_import_leaves(["harmless", "broken_module", "not_there_at_all"]) == ""
    assert "harmless" not in sys.modules
    assert dict(os.environ) == before
