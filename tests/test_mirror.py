"""Tests lie where the code lies that they are about, and share what helps them through modules that hold no tests.

What the tests of several folders use lies in ``tests/helpers``, what those of one folder use lies beside them.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
HELPERS = TESTS / "helpers"
FILES = sorted(TESTS.rglob("test_*.py"))


OF_SEVERAL_ROOMS = {"browser", "cli", "distributed", "docs", "e2e", "faults", "formats", "gpu", "security"}
"""Folders of tests that are about what several rooms, or all of them, do together."""


def has_home(folder: Path) -> bool:
    """Whether the code has a folder of this name, or the tests are about several."""
    name = folder.relative_to(TESTS)
    homes = (TESTS.parent, TESTS.parent / "service", TESTS.parent / "trivet")
    return name == Path() or str(name) in OF_SEVERAL_ROOMS or any((home / name).is_dir() for home in homes)


def test_folders_of_tests_are_named_after_folders_of_the_code() -> None:
    assert [folder for folder in {path.parent for path in FILES} if not has_home(folder)] == []
    assert not has_home(TESTS / "trainings")
    assert not has_home(TESTS / "bounds" / "nothing")


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    """Test modules have no packages, so two of one name cannot be collected together."""
    names = Counter(path.name for path in FILES)
    assert [name for name, count in names.items() if count > 1] == []


@cache
def imports(path: Path) -> list[str]:
    """Return the modules that a file imports, in functions too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def test_no_module_of_tests_is_imported() -> None:
    names = {path.stem for path in FILES}
    found = [
        f"{path.relative_to(TESTS)}: {module}"
        for path in sorted(TESTS.rglob("*.py"))
        for module in imports(path)
        if module.split(".")[-1] in names
    ]
    assert found == []


def test_what_the_tests_of_several_folders_use_lies_in_helpers() -> None:
    beside = {
        path.stem: path.parent
        for path in TESTS.rglob("*.py")
        if path not in FILES and path.stem not in {"conftest", "__init__"} and HELPERS not in path.parents
    }
    strangers = [
        f"{path.relative_to(TESTS)}: {module} of {home.relative_to(TESTS)}"
        for path in sorted(TESTS.rglob("*.py"))
        for module in imports(path)
        if (home := beside.get(module)) and home not in path.parents
    ]
    assert strangers == []


def test_a_service_that_lives_for_the_session_has_a_broker_of_its_own() -> None:
    """On the shared one it would act on what the tests of other folders put there."""
    strangers = []
    for path in sorted(TESTS.rglob("conftest.py")):
        text = path.read_text()
        takes_broker = any(
            isinstance(node, ast.FunctionDef)
            and any(argument.arg == "broker" for argument in node.args.args)
            and any("session" in ast.unparse(decorator) for decorator in node.decorator_list)
            for node in ast.walk(ast.parse(text))
        )
        if takes_broker and "import own_broker" not in text:
            strangers.append(str(path.relative_to(TESTS)))
    assert strangers == []


def test_no_fixture_is_of_a_package() -> None:
    """The folders of tests are no packages, so such a fixture lives for the session."""
    assert [
        str(path) for path in TESTS.rglob("*.py") if path != Path(__file__) and 'scope="package"' in path.read_text()
    ] == []
