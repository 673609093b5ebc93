"""The page about the store's scripts says what their headers say."""

from __future__ import annotations

from docs.site import scripts
from service.jobs.store import acl


def test_the_tables_are_those_of_the_headers() -> None:
    assert scripts.tables() in scripts.PAGE.read_text(), "run `python docs/site/scripts.py`"


def test_every_script_has_a_caller() -> None:
    called = {script.name for script in (*acl.API_SCRIPTS, *acl.HOST_SCRIPTS)}
    assert called == {path.stem for path in scripts.script_files()}


def test_libraries_come_after_those_that_they_need() -> None:
    misplaced = []
    for path in scripts.script_files():
        used = scripts.uses(path)
        for position, library in enumerate(used):
            missing = set(scripts.needs(library)) - set(used[:position])
            misplaced += [f"{path.stem}: {library} needs {each}" for each in missing]
    assert misplaced == []
