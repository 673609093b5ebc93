"""Texts of nested brackets, with the line of every token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.formats.vnnlib.query import VnnlibError

_TOKEN = re.compile(r"[()]|[^\s();]+|;[^\n]*|\n")
DEEPEST = 100
"""Brackets within brackets: no real property comes near, and what reads them calls itself for each."""


@dataclass(frozen=True)
class Token:
    text: str
    line: int

    def refuse(self, expected: str) -> VnnlibError:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:60]}…"
        return VnnlibError(f"line {self.line}: got {shown!r}, expected {expected}")


Tree = Token | list["Tree"]


def trees(text: str) -> Iterator[list[Tree]]:
    """Yield top-level expressions, one at a time: files of thousands of lines never become one tree."""
    stack: list[list[Tree]] = []
    opened: list[Token] = []
    line = 1
    for match in _TOKEN.finditer(text):
        token = Token(match.group(), line)
        if token.text == "\n":
            line += 1
        elif token.text == "(":
            if len(stack) == DEEPEST:
                raise token.refuse(f"at most {DEEPEST} brackets within each other")
            stack.append([])
            opened.append(token)
        elif token.text == ")":
            if not stack:
                raise token.refuse("no closing bracket here")
            done = stack.pop()
            opened.pop()
            if stack:
                stack[-1].append(done)
            else:
                yield done
        elif not token.text.startswith(";"):
            if not stack:
                raise token.refuse("'('")
            stack[-1].append(token)
    if opened:
        raise VnnlibError(f"line {opened[-1].line}: got '(' that nothing closes, expected ')'")


def first(tree: Sequence[Tree | None]) -> Token:
    """Return the first token within, for a message."""
    for part in tree:
        if isinstance(part, Token):
            return part
        if part:
            return first(part)
    return Token("()", 0)
