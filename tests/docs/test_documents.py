"""The documents are true: what they name exists, and their commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, commands

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), RESULTS]
ROOMS = ("api", "benchmarks", "docker", "docs", "examples", "service", "tests", "trivet", "workers")


def test_the_glossary_has_each_term_once() -> None:
    """A section's terms may stand in another one, of another trade; in none twice."""
    sections = (ROOT / "docs" / "learn" / "glossary.md").read_text().split("\n## ")[1:]
    twice = []
    for section in sections:
        name, *lines = section.splitlines()
        terms = [line.split("|")[1].strip().lower() for line in lines if line.startswith("|")]
        words = [word.strip() for term in terms for word in re.sub(r"\(.*?\)", "", term).split(",")]
        twice += [f"{name}: {word}" for word in sorted(set(words)) if words.count(word) > 1]
    assert twice == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_readme_takes_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_results_are_one_page_and_name_scripts_and_commits_that_there_are() -> None:
    text = RESULTS.read_text()
    assert len(text.splitlines()) <= 300
    scripts = set(re.findall(r"(\w+\.py)", text))
    assert [name for name in scripts if not (RESULTS.parent / name).exists()] == []
    ids = sorted(set(re.findall(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,8}\b", text)))
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, cwd=ROOT, capture_output=True, text=True, check=False).stdout != "false\n":
        pytest.skip("the whole history is not here")
    asked = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        input="".join(f"{each}^{{commit}}\n" for each in ids),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(ids) > 40
    assert [line for line in asked.stdout.splitlines() if " commit " not in line] == []


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_a_page_name_one_of_its_headings(path: Path) -> None:
    links = re.findall(r"\]\(((?!http)[^)#]*)#([^)]+)\)", path.read_text())
    missing = [
        f"{page}#{anchor}" for page, anchor in links if anchor not in anchors(path.parent / page if page else path)
    ]
    assert not missing


def test_what_is_to_be_changed_is_in_the_files_that_are_named() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"^What to change for .*?`([\w/]+)`.*\n\n((?:\|.*\n)+)", text, re.MULTILINE)
    kinds = [
        "service/verification",
        "service/verification/bab",
        "service/bounds",
        "service/training",
        "service/compilation",
    ]
    rooms = ["service/jobs", "api", *kinds]
    assert [folder for folder, _ in tables] == rooms
    for folder, table in tables:
        sources = "\n".join(path.read_text() for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".lua"})
        names = re.findall(r"`([\w./]+)`", table)
        there = [name for name in names if (ROOT / folder / name).exists() or (ROOT / name).exists()]
        assert [name for name in names if name not in there and not re.search(rf"\b{name}\b", sources)] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(ROOT / "CONTRIBUTING.md"))
def test_the_commands_for_contributors_can_be_run(command: str) -> None:
    """Those of ``make`` and ``pytest`` do what this run is part of, so only their targets are looked up; pictures of
    every page take minutes, and the browser tests open each page anyway.
    """
    words = shlex.split(command, comments=True)
    words = [sys.executable if word == ".venv/bin/python" else word for word in words]
    if words[0] == "make":
        words = ["make", "--dry-run", *words[1:]]
    elif "pytest" in words:
        words.append("--collect-only")
    elif words[1].endswith("pictures.py"):
        words[2:] = ["--help"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
