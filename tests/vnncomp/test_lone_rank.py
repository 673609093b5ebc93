"""The room of a rank without a service."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trivet.cli.exit_codes import ExitCode
from trivet.cli.main import program
from trivet.vnncomp import deciding
from trivet.vnncomp.lone_rank import lone_rank


@pytest.mark.parametrize("command", ["run", "prepare"])
def test_a_run_that_is_asked_to_end_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    rooms = []

    def decide(*_: Any) -> None:
        with lone_rank({}) as rank:
            rooms.append(rank.scratch)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(deciding, "decide", decide)
    monkeypatch.setattr(deciding, "prepare", decide)
    monkeypatch.setattr("trivet.cli.vnncomp._question", lambda *_: None)
    monkeypatch.setattr("trivet.cli.vnncomp.find_decider", lambda *_: None)
    words = ["vnncomp", command, "tiny", "net.onnx", "query.vnnlib"]
    ran = CliRunner().invoke(program(), words + [str(tmp_path / "results"), "9"] * (command == "run"))
    assert ran.exit_code == ExitCode.INTERRUPTED
    assert [room.exists() for room in rooms] == [False]
