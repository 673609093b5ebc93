"""The wheels are whole: installed outside the checkout, one runs the demo, the other is a client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
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


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What wheels are made of; a copy, since setuptools would add what an earlier build has left in the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    for room in (*ROOMS, "examples", "client"):
        shutil.copytree(
            ROOT / room, folder / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "build")
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def install(sources: Path, folder: Path) -> Path:
    """Return an environment with the wheel of these sources. PyTorch and other packages are those of the tests, which
    would take minutes to install: their folder is named in a ``.pth`` file. Such a line runs no ``.pth`` of that
    folder, so this checkout, which is installed there as editable, is not found; the tests make sure of it.
    """
    run([*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources], folder, 300)
    (wheel,) = folder.glob("*.whl")
    made = folder / "env"
    venv.create(made, symlinks=True)
    (packages_of(made) / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = made / "bin" / "python"
    run([*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], folder, 300)
    return made


def packages_of(made: Path) -> Path:
    return next((made / "lib").glob("python3*")) / "site-packages"


@pytest.fixture(scope="module")
def installed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(sources, tmp_path_factory.mktemp("wheel"))


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
    packages = packages_of(installed)
    wanted = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    wanted += [Path("trivet") / path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.yaml")]
    missing = [path for path in wanted if "__pycache__" not in path.parts and not (packages / path).is_file()]
    assert missing == []


def test_the_client_wheel_brings_the_command_and_no_service(sources: Path, tmp_path: Path) -> None:
    made = install(sources / "client", tmp_path)
    packages = packages_of(made)
    own = {path.name.partition("-")[0] for path in packages.iterdir()}
    assert own - {"pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils"} == {
        "others.pth", "service", "trivet", "trivet_client",
    }  # fmt: skip
    assert not (packages / "service" / "training").exists()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run([made / "bin" / "trivet", "--version"], tmp_path, 60) == f"trivet {version}\n"
    assert "kind: train" in run([made / "bin" / "trivet", "init", "train"], tmp_path, 60)
