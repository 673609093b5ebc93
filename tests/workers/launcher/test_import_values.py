"""What modules take from their process when they are imported is, in a fork, what it is in a new interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lanes import first_fast

from service.jobs.kinds.registry import KINDS

PRELOADS = [module for kind in KINDS.provided for module in KINDS.declaration(kind).preloads]
DUMP = """
import json, os, pathlib, sys, types
PLAIN = (str, bytes, int, float, bool, pathlib.PurePath)

def parts(value):
    if isinstance(value, dict):
        return [(str(key), each) for key, each in list(value.items()) if isinstance(key, str)]
    if isinstance(value, (list, tuple)):
        return [(str(index), each) for index, each in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = [("closure", cell.cell_contents) for cell in value.__closure__ or () if cell != types.CellType()]
        return [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items(), *cells]
    if isinstance(value, types.ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [(name, each) for name, each in list(vars(value).items()) if not name.startswith("__")]

def walk(value, path, depth, found, seen):
    if isinstance(value, PLAIN):
        found[path] = repr(value)
    elif depth and id(value) not in seen:
        seen[id(value)] = value
        for name, part in parts(value):
            walk(part, f"{path}.{name}", depth - 1, found, seen)

found, seen = {}, {}
for name, module in sorted(sys.modules.items()):
    if name not in ("__main__", "sys", "os", "posix") and isinstance(module, types.ModuleType):
        walk(vars(module), name, 4, found, seen)
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
"""
IMPORTS = "import importlib, json, os, sys, torch\nfrom workers.launcher import forked_ranks\n"
FORKS = f"""
{IMPORTS}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
code = forked_ranks.ForkedProgram(json.loads(sys.argv[2]), json.loads(sys.argv[3])).wait(300.0)
os._exit(code)
"""
FRESH = f"""
{IMPORTS}
modules, script, sys.argv[1] = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
for module in modules:
    importlib.import_module(module)
exec(open(script).read())
"""
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
OF_EVERY_PROCESS = ("psutil._last_", "threading.", "tempfile.tempdir", "workers.launcher.", "signal.", "filelock.")
"""Values that change while a process runs, whatever it has imported."""
UNSETTLED = ("torch._dynamo.variables.torch_function.banned_attrs", "sympy.Dummy._count")
"""Values in which two fresh interpreters may differ: a list of what is in a set, in whatever order addresses give, and
how many symbols SymPy made to find out what a sum is, in an order that it shuffles."""


class Processes:
    """A launcher and ranks, each with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forked: dict[tuple[str, ...], dict[str, str]] = {}
        self.script = folder / "dump.py"
        self.script.write_text(DUMP)
        self.launcher, self.rank = (self._environment(name) for name in ("of-launcher", "of-rank"))
        self.launcher |= NO_THREADS
        self.rank |= {"TZ": "Asia/Tokyo", "RANK": "1", "LOCAL_RANK": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "ti")}

    def _environment(self, name: str) -> dict[str, str]:
        places = {variable: self.folder / name / variable.lower() for variable in ("HOME", "TMPDIR")}
        for place in places.values():
            place.mkdir(parents=True)
        shared = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TZ": "UTC"}
        return shared | {"USER": name, "LOGNAME": name} | {variable: str(place) for variable, place in places.items()}

    def forked(self, preloads: Sequence[str] = PRELOADS) -> dict[str, str]:
        """Return the values in a rank that is forked from the launcher, which has imported these modules."""
        if tuple(preloads) not in self._forked:
            words = json.dumps([sys.executable, "-u", str(self.script), str(self.folder / "forked.json")])
            self._run(self.launcher, FORKS, json.dumps(preloads), words, json.dumps(self.rank))
            self._forked[tuple(preloads)] = self._read("forked")
        return self._forked[tuple(preloads)]

    def fresh(self, name: str) -> dict[str, str]:
        """Return the values in a rank that has imported everything itself."""
        self._run(self.rank, FRESH, json.dumps(PRELOADS), str(self.script), str(self.folder / f"{name}.json"))
        return self._read(name)

    def _run(self, environment: dict[str, str], *words: str) -> None:
        subprocess.run([sys.executable, "-W", "ignore", "-c", *words], env=environment, check=True)

    def _read(self, name: str) -> dict[str, str]:
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return {path: value for path, value in found.items() if not path.startswith((*OF_EVERY_PROCESS, *UNSETTLED))}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    return Processes(tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("preloads", first_fast(1, [PRELOADS[:1], PRELOADS]))
def test_nothing_in_a_fork_names_the_folders_or_the_user_of_its_launcher(
    processes: Processes, preloads: list[str]
) -> None:
    forked = processes.forked(preloads)
    assert {path: value for path, value in forked.items() if "of-launcher" in value} == {}
    assert any("of-rank" in value for value in forked.values())


def test_what_is_preloaded_for_trainings_brings_no_package_of_models(processes: Processes) -> None:
    found = {path.partition(".")[0] for path in processes.forked(PRELOADS[:1])}
    assert found & {"service", "timm", "torch", "torchvision", "transformers"} == {"service", "torch"}


@pytest.mark.slow
def test_a_fork_has_the_values_of_a_fresh_interpreter(processes: Processes) -> None:
    """Left out is what two fresh interpreters differ in: addresses, and what is drawn at random."""
    forked, fresh, again = processes.forked(), processes.fresh("fresh"), processes.fresh("again")
    shared = [path for path in forked.keys() & fresh.keys() & again.keys() if fresh[path] == again[path]]
    assert len(shared) > 10_000
    assert {path: (forked[path], fresh[path]) for path in shared if forked[path] != fresh[path]} == {}
