"""Checks jobs that run a script of their author's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from service.formats.archive import ArchiveError
from service.formats.script import check_script
from service.jobs.plugins import CheckContext, JobKind
from service.jobs.records import Problem
from service.jobs.spec.script import ScriptSpec


def check(spec: ScriptSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the script may not run, or could not."""
    for project in context.without_scripts:
        message = f"project '{project}' may not run scripts: it lacks scripts: true"
        yield Problem("kind", message, "script", f"what an operator allows by trivet projects set {project} --scripts")
    for index, pattern in enumerate(spec.keep):
        if pattern == "." or any("**" in part and part != "**" for part in PurePosixPath(pattern).parts):
            expected = "a pattern such as out/*.pt, where ** is any folders and stands alone between slashes"
            yield Problem(f"keep.{index}", "it is no pattern of files", pattern, expected)
    if context.without_scripts or (path := context.path_of(spec.archive)) is None:
        return
    try:
        check_script(path, spec.entry)
    except ArchiveError as error:
        expected = f"a zip or an uncompressed tar of regular files, {spec.entry} among them"
        yield Problem("archive", str(error), spec.archive, expected)


SCRIPT = JobKind(ScriptSpec, "service.scripts.job:run", check, preloads=("service.scripts.job",))
