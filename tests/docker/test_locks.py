"""The locks that images are built from: whole, digested, and of the versions that the tests run with."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OF_RANKS: tuple[str, ...] = runpy.run_path(str(ROOT / "docker" / "lock.py"))["OF_RANKS"]
LOCKS = ("requirements.lock", "worker.lock", "torch-cuda.lock", "torch-cpu.lock")
ENTRY = re.compile(r"(?m)^([A-Za-z0-9._-]+)==(\S+)(.*?\\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def locked(name: str) -> dict[str, str]:
    """Version by package; that every line belongs to an entry with digests is checked on the way."""
    text = (ROOT / name).read_text()
    assert re.sub(r"(?m)^#.*\n", "", ENTRY.sub("", text)) == ""
    return {str(canonicalize_name(package)): version for package, version, _ in ENTRY.findall(text)}


def runtime() -> list[Requirement]:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = described["project"]
    lists = project["dependencies"], project["optional-dependencies"]["service"], described["build-system"]["requires"]
    return [Requirement(each) for listed in lists for each in listed]


def closure(requirements: list[Requirement]) -> set[str]:
    """What requirements bring here, as the packages that are installed say."""
    found: set[str] = set()
    waiting = [(each, extra) for each in requirements for extra in (each.extras or {""})]
    while waiting:
        requirement, extra = waiting.pop()
        name = str(canonicalize_name(requirement.name))
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            if str(canonicalize_name(needed.name)) not in found:
                waiting += [(needed, each) for each in (needed.extras or {""})]
    return found


def of_kind(needed: list[Requirement], lock: str) -> list[Requirement]:
    """The requirements whose own needs this environment knows: a torch for CUDA does not tell those of one without."""
    brings_cuda = any("cuda" in line for line in importlib.metadata.requires("torch") or ())
    return [each for each in needed if each.name != "torch" or lock == "torch-cuda.lock" or not brings_cuda]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_of_the_constraints(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constrained = dict(line.split("==") for line in lines if not line.startswith("#"))
    known = {str(canonicalize_name(package)): version for package, version in constrained.items()}
    differs = {
        each: version
        for each, version in locked(name).items()
        if each in known and known[each] != version.partition("+")[0]
    }
    assert differs == {}


def test_the_locks_hold_all_that_is_needed_in_versions_that_are_allowed() -> None:
    """`make lock` writes them again."""
    needed = runtime()
    for torch in ("torch-cuda.lock", "torch-cpu.lock"):
        parts = [locked(name) for name in ("requirements.lock", "worker.lock", torch)]
        whole = parts[0] | parts[1] | parts[2]
        assert "torch" in parts[2]
        assert [each for each in needed if not each.specifier.contains(whole[str(canonicalize_name(each.name))])] == []
        assert closure(of_kind(needed, torch)) - whole.keys() == set()
        assert len(whole) == sum(map(len, parts))


def test_the_api_has_what_it_needs_and_nothing_that_only_ranks_do() -> None:
    needed = [each for each in runtime() if each.name not in OF_RANKS]
    assert closure(needed) - locked("requirements.lock").keys() == set()
    assert locked("requirements.lock").keys() & set(OF_RANKS) == set()


def test_images_are_built_from_the_locks_alone() -> None:
    """Each package that one installs has its digest checked, or is this one, and the files are let into the build."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ((?:(?!&&|;|\|\|).)*)", text)
    assert sum("--require-hashes --no-deps" in each for each in installs) == 3
    assert sum(each.split() == ["--no-deps", "/wheel/*.whl"] for each in installs) == len(installs) - 3
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [word for line in re.findall(r"(?m)^COPY (?!--from=)(.*)$", text) for word in line.split()[:-1]]
    mounted = re.findall(r"type=bind,source=([^,]*\.lock)", text)
    assert {*mounted, *LOCKS} == {*mounted}
    assert [each for each in (*copied, *mounted) if f"!{each}" not in allowed or not (ROOT / each).exists()] == []
