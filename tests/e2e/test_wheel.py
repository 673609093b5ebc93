"""The wheel is whole: installed outside the checkout, it runs the demo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "service", "trivet", "workers")
pytestmark = [pytest.mark.slow(90), pytest.mark.distributed]


def run(command: list[str | Path], folder: Path, within_s: float) -> str:
    """Run a command that reads nothing of this checkout: neither its folder nor its settings."""
    outer = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRIVET_", "PYTEST_", "PYTHON", "COVERAGE_"))
    }
    environment = {**outer, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. PyTorch and other packages are those of the tests, which would take minutes to
    install: their folder is named in a ``.pth`` file. Such a line runs no ``.pth`` of that folder, so this checkout,
    which is installed there as editable, is not found; the test makes sure of it.
    """
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a copy: setuptools would add what an earlier build has left in the checkout
    for room in (*ROOMS, "examples"):
        shutil.copytree(ROOT / room, sources / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources], folder, 300)
    (wheel,) = folder.glob("trivet-*.whl")
    made = folder / "env"
    venv.create(made, symlinks=True)
    packages = next((made / "lib").glob("python3*")) / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = made / "bin" / "python"
    run([*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], folder, 300)
    return made


def test_the_installed_wheel_runs_the_demo_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import api, service, trivet, workers; print(*(m.__path__[0] for m in (api, service, trivet, workers)))"
    found = run([installed / "bin" / "python", "-c", code], tmp_path, 60).split()
    assert all(Path(each).is_relative_to(installed) for each in found), found
    said = run([installed / "bin" / "trivet", "demo"], tmp_path, 800)
    assert [line.split()[:2] for line in said.splitlines() if " succeeded " in line] == [
        ["train", "succeeded"], ["verify", "succeeded"], ["compile", "succeeded"],
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_has_every_file_that_is_no_module(installed: Path) -> None:
    packages = next((installed / "lib").glob("python3*")) / "site-packages"
    wanted = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    wanted += [Path("trivet") / path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.yaml")]
    missing = [path for path in wanted if "__pycache__" not in path.parts and not (packages / path).is_file()]
    assert missing == []
