"""Adds to the site what is kept elsewhere: pages of the repository's root, and references made from the code.

MkDocs calls the functions whose names begin with ``on_`` (https://www.mkdocs.org/dev-guide/plugins/#events).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.site import rest, specs  # noqa: E402 - which the line before makes importable

_FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that are files of the root."""
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not below ``docs``."""
    made = {name: (ROOT / source).read_text() for name, source in _FROM_ROOT.items()}
    made |= {f"reference/{kind}.md": specs.page(kind) for kind in specs.KINDS}
    made["reference/rest.md"] = rest.page()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to pages of the site; of those to other files of the repository only the words stay."""
    here = page.file.src_uri
    folder = Path("docs", here).parent if here not in _FROM_ROOT else Path()
    return _LINK.sub(lambda found: _led(found, folder.as_posix(), here), markdown)


def _led(found: re.Match[str], folder: str, here: str) -> str:
    words, target = found[1], found[2]
    path, _, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return found[0]
    name = _on_site(normpath(os.path.join(folder, path)))  # noqa: PTH118 - paths of links
    if name is None:
        return words
    return f"[{words}]({relpath(name, Path(here).parent.as_posix())}{f'#{anchor}' if anchor else ''})"


def _on_site(path: str) -> str | None:
    """Return which page of the site a file of the repository is, if any."""
    if path == "README.md":
        return "index.md"
    known = {source: name for name, source in _FROM_ROOT.items()}
    return known.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
