"""Markdown is well formed: what merges and hurried edits break is named with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from pages import ROOT

WIDTH = 125
"""Columns of a line of text, without the targets of its links; CONTRIBUTING states it."""
FOLDERS = ("docs", "benchmarks", "examples", "docker", "tests", "api", "service", "trivet", "workers")
PAGES = [*sorted(ROOT.glob("*.md")), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
SEPARATOR = re.compile(r"\|(\s*:?-+:?\s*\|)+$")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")


@dataclass
class Block:
    """Lines that belong together, from line ``start`` on: of a ``table``, a ``heading``, a ``list`` or ``text``."""

    kind: str
    start: int
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(line.strip() for line in self.lines)


def kind_of(line: str, before: str) -> str:
    if line.lstrip().startswith("|"):
        return "table"
    if line.startswith("#"):
        return "heading"
    return "list" if ITEM.match(line) or (before == "list" and line.startswith(" ")) else "text"


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page, without code; its fences are blocks of kind ``fence``."""
    fenced, current = False, Block("blank", 0)
    for number, line in enumerate(page.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        kind = "fence" if is_fence or fenced else kind_of(line, current.kind) if line.strip() else "blank"
        if kind != current.kind or (is_fence and not fenced):
            yield current
            current = Block(kind, number)
        current.lines.append(line)
        fenced ^= is_fence
    yield current


def faults(page: str, *, repeats: bool = False) -> list[str]:
    """Return what is wrong with a page; ``repeats``: it may say a sentence twice."""
    found, said = [], dict[str, int]()
    parts = list(blocks(page))
    for block, after in pairwise([*parts, Block("blank", 0)]):
        if block.kind == "table":
            found += table_faults(block)
        if block.kind in ("text", "list"):
            found += wide_lines(block)
            found += [] if repeats else doubled(block, said)
            if after.kind == "fence":
                found.append(f"{after.start}: no blank line before a fence")
    shown = [block for block in parts if block.kind != "blank"]
    for block, after in pairwise([*shown, Block("blank", 0)]):
        if block.kind == "text" and after.kind != "list" and not re.search(r"[.:!?]\W*$|^\W*\[.*\)$", block.text):
            found.append(f"{block.start}: a paragraph that breaks off: {block.text[-30:]}")
    return found


def table_faults(block: Block) -> Iterator[str]:
    rows = [re.sub(r"`[^`]*`|\\\|", "", line).strip() for line in block.lines]
    separators = [number for number, row in enumerate(rows) if SEPARATOR.match(row)]
    if separators != [1]:
        yield f"{block.start}: a table needs one separator, in its second row"
    if len({row.count("|") for row in rows}) > 1:
        yield f"{block.start}: rows of a table differ in their cells"


def wide_lines(block: Block) -> Iterator[str]:
    for number, line in enumerate(block.lines, block.start):
        if len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH:
            yield f"{number}: more than {WIDTH} columns"


def doubled(block: Block, said: dict[str, int]) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", block.text):
        if len(sentence.split()) > 4 and said.setdefault(sentence, block.start) != block.start:
            yield f"{block.start}: the sentence of line {said[sentence]} again: {sentence[:30]}"


def test_every_page_is_well_formed() -> None:
    found = {path: faults(path.read_text(), repeats=path.name == "CHANGELOG.md") for path in PAGES}
    assert [f"{path.relative_to(ROOT)}:{fault}" for path, each in found.items() for fault in each] == []


def test_the_stated_width_is_the_one_that_is_kept() -> None:
    assert f"{WIDTH} columns" in (ROOT / "CONTRIBUTING.md").read_text()


SENTENCE = "One sentence of six words.\n"


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("| a |\n|---|\n|---|\n| b |\n", "1: a table needs one separator, in its second row"),
        ("| a |\n| b |\n", "1: a table needs one separator, in its second row"),
        ("| a | b |\n|---|---|\n| c |\n", "1: rows of a table differ in their cells"),
        ("Run this:\n```console\n$ make\n```\n", "2: no blank line before a fence"),
        ("Some text and\n\nMore of it.\n", "1: a paragraph that breaks off: Some text and"),
        (f"Text.\n{'long ' * 26}line.\n", "2: more than 125 columns"),
        (f"{SENTENCE}\n{SENTENCE}", "3: the sentence of line 1 again: One sentence of six words."),
    ],
)
def test_each_accident_is_found(page: str, fault: str) -> None:
    assert faults(page) == [fault]


@pytest.mark.parametrize(
    "page",
    [
        "| `a | b` | c |\n|:--|--:|\n| d \\| e | f |\n",
        "Before a list\n\n- an item without a full stop\n- another\n",
        f"See [{'x' * 60}]({'y' * 90}).\n",
        f"```\n{'long ' * 40}\n| no table\n```\n",
        "![A picture](picture.png)\n",
    ],
)
def test_what_is_well_formed_passes(page: str) -> None:
    assert faults(page) == []
