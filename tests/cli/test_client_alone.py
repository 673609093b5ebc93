"""The client without the service: what ``pip install trivet-client`` brings is enough for it and for its commands.

Its own modules are those of a build, and packages of the service cannot be imported in the process of these tests. It
notes each attempt: an import that is tried and given up would be as slow for those who have the package.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_world import Cli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RUN = """
import contextlib, importlib.abc, importlib.metadata, io, json, re, sys
order = json.loads(sys.argv[1])
tried = []

def is_light(owners):
    return any(re.sub("[-_.]+", "-", each).lower() in order["light"] for each in owners)

# Asked here: a process of tests may have added folders of more packages to its path.
found = importlib.metadata.packages_distributions()
absent = {name for name, owners in found.items() if not is_light(owners)} - sys.stdlib_module_names
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]  # to this checkout

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in absent:
            tried.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import trivet
from trivet.cli import main

ran = []
for words in order["commands"]:
    out, err = io.StringIO(), io.StringIO()
    sys.argv, code, before = ["trivet", *words], 0, len(tried)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    ran.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "tried": tried[before:]})
with trivet.Client() as client:
    jobs = [job.id for job in client.jobs()]
homes = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in ("service", "trivet")]
print(json.dumps({"ran": ran, "jobs": jobs, "tried": tried, "absent": sorted(absent), "homes": homes}))
"""


def of_a_client() -> set[str]:
    """The distributions that Trivet brings without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = {"trivet"}
    waiting: list[str] = project["dependencies"]
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        if name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += importlib.metadata.requires(name) or ()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of ``trivet-client``, as its wheel has them."""
    folder = tmp_path_factory.mktemp("client")
    command = [sys.executable, "setup.py", "-qq", "build_py", "--build-lib", folder]
    subprocess.run(command, cwd=ROOT / "client", check=True)
    return folder


def run(trivet: Cli, built: Path, *commands: list[str]) -> dict[str, Any]:
    order = json.dumps({"light": sorted(of_a_client()), "commands": commands})
    environment = trivet._environment({"PYTHONPATH": str(built)})
    command = [sys.executable, "-c", RUN, order]
    ran = subprocess.run(command, env=environment, cwd=trivet.folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    assert {"torch", "numpy", "fastapi", "celery", "redis", "psutil"} <= set(told["absent"])
    assert [home for home in told["homes"] if not Path(home).is_relative_to(built)] == []
    return told


def test_a_client_alone_submits_follows_and_reads_jobs(trivet: Cli, built: Path) -> None:
    job = trivet.ok("submit", trivet.spec()).out.strip()
    commands = [
        ["--help"], ["jobs"], ["show", job], ["submit", trivet.spec()], ["validate", trivet.spec()], ["logs", job],
        ["metrics", job], ["artifacts", job], ["queue"], ["hosts"], ["keys", "list"], ["kinds"], ["alerts"],
        ["settings"], ["init", "verify"], ["schedule", str(ROOT / "examples" / "pipeline.yaml")],
        ["cancel", job], ["watch", job],
    ]  # fmt: skip
    told = run(trivet, built, *commands)
    codes = {words[0]: each["code"] for words, each in zip(commands, told["ran"], strict=True)}
    assert codes == {**dict.fromkeys(codes, 0), "watch": 1}, told["ran"]  # a cancelled job is no success
    assert set(told["tried"]) <= {"sniffio"}  # a few lines, which the HTTP library asks for
    assert "mine" in told["ran"][2]["out"]
    assert {job, told["ran"][3]["out"].strip()} == set(told["jobs"])


def test_what_needs_more_says_what_to_install(trivet: Cli, built: Path) -> None:
    commands = [["up"], ["api"], ["worker"], ["doctor"], ["backup", "x.tar"], ["broker", "acl", "x"]]
    for ran in run(trivet, built, *commands)["ran"]:
        assert (ran["code"], ran["out"]) == (2, "")
        assert "pip install 'trivet[service]'" in ran["err"]
    assert list(trivet.folder.iterdir()) == []
