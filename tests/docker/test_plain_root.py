"""The Dockerfile runs line by line in plain folders, where there is no engine of containers."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
PLAIN: dict[str, Any] = runpy.run_path(str(ROOT / "docker" / "plain.py"), run_name="plain")
ASKS_THE_INDEX = [sys.executable, "-m", "pip", "--timeout", "20", "index", "versions", "torch"]


def built(folder: Path, text: str) -> Any:
    """A build in which commands are only noted, as (stage, user, command, what is mounted where)."""

    class Noting(PLAIN["Build"]):  # type: ignore[misc]
        def execute(self, stage: Any, command: list[str], binds: Any = ()) -> None:
            noted.append((stage.root.name, stage.user, command[-1], [target for _, target in binds]))

    noted: list[tuple[str, str, str, list[str]]] = []
    build = Noting(folder, {"TORCH": "cuda"}, lambda root: root.mkdir(parents=True))
    (folder / "packages").parent.mkdir(exist_ok=True)
    build.run(text)
    build.noted = noted
    return build


def test_no_line_of_the_dockerfile_is_left_out(tmp_path: Path) -> None:
    """Volumes are made by a command, which only notes here, and so are wheels."""
    build = built(tmp_path, re.sub(r"(?m)^VOLUME.*$", "", DOCKERFILE))
    keywords = re.findall(r"(?m)^([A-Z]+) ", DOCKERFILE)
    assert len(list(PLAIN["instructions"](DOCKERFILE))) == len(keywords)
    assert len(build.noted) == keywords.count("RUN")
    assert list(build.stages) == re.findall(r"(?m)^FROM .* AS (\w+)$", DOCKERFILE)
    worker = build.stages["worker"]
    assert (worker.user, worker.entry, worker.arguments["TORCH"]) == ("trivet", ["tini", "--", "trivet"], "cuda")
    assert worker.environment["PATH"].startswith("/opt/trivet/bin:/usr/local/sbin:")
    assert worker.environment["TRIVET_STOP_JOBS"] == "true"
    (torch,) = [each for each in build.noted if "torch-$TORCH.lock" in each[2]]
    assert torch[0] == "worker"
    assert "/locks/torch-cuda.lock" in torch[3]
    assert (worker.root / worker.environment["PACKAGES"].lstrip("/") / "service" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("HEALTHCHECK CMD true", "does not know the instruction HEALTHCHECK"),
        ("RUN --mount=type=secret,target=/x true", "does not know the option --mount=type=secret"),
        ("RUN --network=none true", "does not know the option --network=none"),
        ("VOLUME /nothing", "the volume /nothing is no folder of the image"),
    ],
)
def test_what_is_not_known_ends_the_build(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        built(tmp_path, f"ARG PYTHON=python\nFROM ${{PYTHON}} AS one\n{line}\n")


@pytest.mark.slow(240)
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="makes root folders, which only root may")
def test_the_image_for_cuda_is_built_in_a_plain_folder_and_imports_torch(tmp_path: Path) -> None:
    if subprocess.run(ASKS_THE_INDEX, stdout=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("no index of packages can be reached")
    if shutil.disk_usage(tmp_path).free < 20 * 2**30:
        pytest.skip("the image and its packages take up to 20 GiB of a disk")
    folder = tmp_path / "image"
    command = [sys.executable, ROOT / "docker" / "plain.py", folder, "TORCH=cuda"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        locked = re.search(r"(?m)^torch==(\S+)", (ROOT / "torch-cuda.lock").read_text())
        assert locked is not None
        assert re.search(rf"torch {locked[1]}\S* for CUDA \d", ran.stdout)
        assert "worker, as trivet:" in ran.stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)
