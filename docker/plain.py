"""Runs every line of docker/Dockerfile in plain folders, where there is no engine: ``python docker/plain.py FOLDER
[NAME=VALUE …]``.

Each stage is a root folder below FOLDER, begun as a copy of the one that it is built from; the first is Debian by
``docker/bases.sh --root``. NAME=VALUE are build arguments, such as ``TORCH=cuda``. An instruction, or an option of one,
that is not known here ends it, so that no line is passed over. At the end the image's own user runs its entry point,
and in the worker's also ``import torch``. It needs root, a mirror of Debian and an index of packages.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOUNTS = ("/proc", "/dev", "/etc/resolv.conf", "/etc/hosts")
"""What an engine gives to each container."""


@dataclass
class Stage:
    """A stage that is being built: its root folder, and what its instructions have set."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    entry: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield keyword and rest of each instruction of a Dockerfile, continued lines joined, comments left out."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for whole in re.split(r"(?<!\\)\n", "\n".join(lines)):
        keyword, _, rest = whole.replace("\\\n", " ").strip().partition(" ")
        if keyword:
            yield keyword.upper(), rest.strip()


class Build:
    """Runs instructions one after the other; ``folder`` gets a root for each stage."""

    def __init__(self, folder: Path, arguments: dict[str, str], base: Callable[[Path], None]) -> None:
        self.folder, self.given, self.base = folder, arguments, base
        self.stages: dict[str, Stage] = {}
        self.defaults: dict[str, str] = {}

    @property
    def stage(self) -> Stage:
        return list(self.stages.values())[-1]

    def run(self, text: str) -> None:
        for keyword, rest in instructions(text):
            began = time.monotonic()
            getattr(self, f"_{keyword.lower()}", self._unknown(keyword))(rest)
            print(f"{time.monotonic() - began:6.1f} s  {keyword} {rest[:90]}", flush=True)

    def _unknown(self, keyword: str) -> Callable[[str], None]:
        def end(rest: str) -> None:
            raise SystemExit(f"docker/plain.py does not know the instruction {keyword}, of {keyword} {rest}")

        return end

    def _expanded(self, text: str) -> str:
        values = self.stage.arguments | self.stage.environment if self.stages else self.defaults
        return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ""), text)

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        values = self.stage.arguments if self.stages else self.defaults
        values[name] = self.given.get(name, default.strip('"'))

    def _from(self, rest: str) -> None:
        source, _, name = (self._from_argument(word) for word in rest.split())
        stage = Stage(self.folder / name, {"PATH": _PATH})
        if source in self.stages:
            before = self.stages[source]
            stage = Stage(stage.root, dict(before.environment), user=before.user)
            subprocess.run(["cp", "--archive", "--reflink=auto", before.root, stage.root], check=True)
        else:
            self.base(stage.root)
        self.stages[name] = stage

    def _from_argument(self, word: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: self.defaults[found[1]], word)

    def _env(self, rest: str) -> None:
        self.stage.environment |= dict(word.split("=", 1) for word in shlex.split(self._expanded(rest)))

    def _copy(self, rest: str) -> None:
        *sources, target = self._expanded(rest).split()
        start = ROOT
        if sources[0].startswith("--from="):
            start = self.stages[sources.pop(0).removeprefix("--from=")].root
        into = self.stage.root / target.lstrip("/")
        for source in sources:
            here = start / source.lstrip("/")
            into.mkdir(parents=True, exist_ok=True)
            if here.is_dir():
                shutil.copytree(here, into, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(here, into)

    def _run(self, rest: str) -> None:
        options = re.match(r"(--\S+\s+)*", rest)
        assert options is not None
        binds = [self._mount(option) for option in options[0].split()]
        self.execute(self.stage, ["/bin/sh", "-c", rest[options.end() :]], binds)

    def _mount(self, option: str) -> tuple[Path, str]:
        """Return what ``--mount`` puts where."""
        name, _, value = option.partition("=")
        parts = {key: of_key for key, _, of_key in (each.partition("=") for each in value.split(","))}
        kind, target = parts.pop("type", ""), parts.pop("target", "")
        if name != "--mount" or kind not in ("bind", "cache") or parts.keys() - {"source", "from"}:
            raise SystemExit(f"docker/plain.py does not know the option {option}")
        if kind == "cache":
            cache = self.folder / "cache" / target.strip("/").replace("/", "-")
            cache.mkdir(parents=True, exist_ok=True)
            return cache, target
        start = self.stages[parts["from"]].root if "from" in parts else ROOT
        return start / parts["source"].lstrip("/"), target

    def _user(self, rest: str) -> None:
        self.stage.user = rest

    def _volume(self, rest: str) -> None:
        if not (self.stage.root / rest.lstrip("/")).is_dir():
            raise SystemExit(f"the volume {rest} is no folder of the image")

    def _entrypoint(self, rest: str) -> None:
        self.stage.entry = [word.strip(' "') for word in rest.strip("[]").split(",")]

    def _cmd(self, rest: str) -> None:
        """Do nothing: what is run at the end is asked for there."""

    def execute(self, stage: Stage, command: list[str], binds: list[tuple[Path, str]] | None = None) -> None:
        """Run a command in a stage as its user, with nothing mounted afterwards."""
        mounts = [*((Path(each), each) for each in _MOUNTS), *(binds or [])]
        script = []
        for source, target in mounts:
            inside = stage.root / target.lstrip("/")
            made = f"mkdir -p {inside}" if source.is_dir() else f"mkdir -p {inside.parent}; touch {inside}"
            script.append(f"{made}; mount --rbind {source} {inside}")
        certificates = {"PIP_CERT": "/etc/ssl/certs/ca-certificates.crt"}
        values = certificates | stage.arguments | stage.environment
        words = ["env", "--ignore-environment", *(f"{name}={value}" for name, value in values.items()), *command]
        script.append(f"exec chroot --userspec={stage.user} {stage.root} {shlex.join(words)}")
        ran = subprocess.run(
            ["unshare", "--mount", "--propagation=private", "sh", "-ec", "\n".join(script)], check=False
        )
        if ran.returncode:  # what it printed is above
            raise SystemExit(f"exit status {ran.returncode}: {shlex.join(command)[:200]}")


def debian(root: Path) -> None:
    subprocess.run([ROOT / "docker" / "bases.sh", "--root", root], check=True)


def main() -> None:
    os.umask(0o022)  # an engine's; with a stricter one of the caller the image's own user could not read its folders
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    build = Build(folder, dict(word.split("=", 1) for word in sys.argv[2:]), debian)
    build.run((ROOT / "docker" / "Dockerfile").read_text())
    for name in ("api", "worker"):
        print(f"{name}, as {build.stages[name].user}:", flush=True)
        build.execute(build.stages[name], [*build.stages[name].entry, "--version"])
    shown = "import torch; print('torch', torch.__version__, 'for CUDA', torch.version.cuda)"
    build.execute(build.stages["worker"], ["python", "-c", shown])


if __name__ == "__main__":
    main()
