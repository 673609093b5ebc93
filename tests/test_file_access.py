"""What touches files in a rank's reach does so through ``service.jobs.files.safe_files``, which follows no link.

A path that was checked may be another file when it is opened. So the modules that run unconfined and handle what ranks
may have made call nothing that takes a path; each exception is listed with the place that it is about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path
    for pattern in (
        "api/**/*.py",
        "workers/agent/*.py",
        "workers/supervisor/*.py",
        "service/jobs/store/backup.py",
        "service/jobs/files/cache.py",
        "service/jobs/events/record_files.py",
        "service/jobs/files/objects.py",
        "service/jobs/store/artifacts.py",
        "service/jobs/store/jobs.py",
        "service/jobs/host/supervisor_registry.py",
    )
    for path in ROOT.glob(pattern)
)
OF_PATHS = frozenset(
    {
        "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "iterdir", "lstat", "mkdir", "open",
        "read_bytes", "read_text", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch", "unlink", "walk",
        "write_bytes", "write_text",
    }
)  # fmt: skip
OF_OS = frozenset(
    {
        "access", "chmod", "chown", "link", "listdir", "lstat", "makedirs", "mkdir", "open", "readlink", "remove",
        "rename", "replace", "rmdir", "scandir", "stat", "symlink", "truncate", "unlink", "utime", "walk",
    }
)  # fmt: skip
SAFE = (
    "Folder.open", "file.open", "folder.rename", "folder.unlink", "log.open", "published.rename", "published.unlink",
    "segment.open", "self._first.open", "self._readers[rank].open", "self._record.open", "self.open",
    "self.store.artifacts.open", "store.artifacts.open",
)  # fmt: skip
"""Calls of safe files themselves."""
ALLOWED = {
    # The key that a new service shows once, in a folder of the operator's choice.
    "api/__main__.py": {"os.open", "path.unlink"},
    # The program's own files.
    "api/dashboard/assets.py": {"STATIC.rglob", "SWAGGER.iterdir", "path.is_file", "path.read_bytes"},
    # The service's own folder of event files, which no rank sees.
    "api/exports/tensorboard.py": {"draft.mkdir", "folder.parent.mkdir", "path.open"},
    # And that of offline runs.
    "api/exports/wandb_process.py": {"Path(folder).mkdir", "shutil.rmtree"},
    "api/server/monitoring.py": {"shutil.disk_usage", "span.rename"},
    # The backup itself and the broker's snapshot; and a data folder that is being restored, in which no job has run.
    "service/jobs/store/backup.py": {
        "draft.rename", "draft.unlink", "layout.root.exists", "layout.root.is_file", "layout.root.iterdir", "os.open",
        "os.utime", "path.chmod", "path.open", "path.parent.mkdir", "shutil.rmtree", "snapshot.open", "snapshot.unlink",
        "tarfile.open", "target.exists",
    },
    # By ranks themselves, in their confinement.
    "service/jobs/files/cache.py": {"os.utime"},
    "service/jobs/events/record_files.py": {"os.open"},
    # Uploads, which no rank can write; and an object.
    "service/jobs/files/objects.py": {"path.is_file", "path.parent.mkdir", "self._system.open"},
    # The folder of a job's attempts, in which ranks make nothing.
    "service/jobs/store/artifacts.py": {"attempts.mkdir"},
    "service/jobs/host/supervisor_registry.py": {
        "atomic_write", "path.read_bytes", "path.unlink", "self._folder / 'lock'.open", "self._folder.glob",
        "self._folder.mkdir", "self._heartbeat.touch",
    },
    # The folder of a launcher, which ranks cannot open, and that of a host.
    "workers/agent/allocated_host.py": {"Path(file).read_text"},
    "workers/agent/agent.py": {"atomic_write", "folder.mkdir"},
    "workers/agent/allocated_part.py": {"os.utime", "self._folder.mkdir"},
    "workers/agent/launching.py": {
        "data.hosts.glob", "folder / 'heartbeat'.exists", "folder.stat", "path.stat", "path.unlink",
        "self._folder.glob",
    },
    "workers/agent/supervisors.py": {"log.parent.mkdir", "self._log.open"},
    "workers/supervisor/image.py": {"os.scandir", "os.stat"},
    "workers/supervisor/keeper.py": {"open", "os.listdir"},
    # Folders that no rank may write to, and in which others are made for ranks.
    "workers/supervisor/attempt.py": {"scratch.mkdir"},
    "workers/supervisor/attempt_folder.py": {"folder.exists", "path.lstat", "path.mkdir", "paths.root.mkdir"},
    "workers/supervisor/attempt_trace.py": {"paths.root.mkdir"},
    "workers/supervisor/group.py": {"Path(where).glob", "folder.lstat", "folder.rmdir", "self.logs.mkdir"},
    "workers/supervisor/mirror.py": {
        "attempt.exists", "paths.root.mkdir", "self._paths.attempt(attempt).exists", "self._paths.root.mkdir",
    },
    "workers/supervisor/job_policy.py": {"layout.cache.mkdir"},
}  # fmt: skip
"""Calls by module that touch nothing in a rank's reach."""


def calls(path: Path) -> Iterator[str]:
    """Yield the functions, as they are written, that take a path and open, list, make or remove what it leads to."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("open", "copyfile", "rmtree", "atomic_write"):
            yield node.func.id
        elif isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            names = OF_OS if owner == "os" else OF_PATHS
            takes_one = node.func.attr in ("rename", "replace") and len(node.args) == 1 and owner != "os"
            if owner == "shutil" or node.func.attr in names or takes_one:
                yield f"{owner}.{node.func.attr}"


def test_files_in_a_ranks_reach_are_opened_safely() -> None:
    found = {path.relative_to(ROOT).as_posix(): {call for call in calls(path) if call not in SAFE} for path in MODULES}
    assert {module: names for module, names in found.items() if names} == ALLOWED
