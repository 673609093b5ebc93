"""What a first `make demo` says: that installing takes a while, where to look meanwhile, and what comes next."""

from __future__ import annotations

import io
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trivet import demo
from trivet.terminal import Terminal

ROOT = Path(__file__).parents[2]


def test_installing_is_announced_before_it_begins() -> None:
    recipe = subprocess.run(
        ["make", "--dry-run", "--what-if=pyproject.toml", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert 0 < recipe.index("installing about 2 GB of packages") < recipe.index("pip install")


def test_the_demo_says_when_to_look_and_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = io.StringIO()
    service = SimpleNamespace(url="http://127.0.0.1:1234", key="tvt_x", client=lambda: nullcontext(None))
    opened = nullcontext(service)

    def run_jobs(_: Any, console: Terminal) -> dict[str, Any]:
        assert "http://127.0.0.1:1234   key: tvt_x   (open it while the demo runs)" in said.getvalue()
        console.print("the jobs run")
        return {"train": SimpleNamespace(state="succeeded")}

    monkeypatch.setattr(demo, "LocalService", lambda settings: opened)
    monkeypatch.setattr(demo, "_run_jobs", run_jobs)
    monkeypatch.setattr(demo, "_print_results", lambda *_: None)
    assert demo.run(Terminal(file=said, width=200)) == 0
    after = said.getvalue().partition("the jobs run")[2]
    assert after.index("`trivet up`") < after.index("trivet init train") < after.index("trivet submit train.yaml")
