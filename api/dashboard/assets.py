"""Names the version of the dashboard's static files, and which modules a page needs.

The version is in the address of each file, so browsers keep files for good. A page names all modules that it
will import, so browsers fetch them at once rather than one after the other.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import mimetypes
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from service.jobs.kinds.registry import KINDS

STATIC = Path(__file__).parent / "static"
SWAGGER = Path(str(importlib.resources.files("fastapi_swagger"))) / "resources"
_IMPORT = re.compile(r'^(?:import|export)\b[^"\n]*"(\.{1,2}/[^"]+)";', re.MULTILINE)


@dataclass(frozen=True)
class Asset:
    """One file as it was when the process started."""

    content: bytes
    media_type: str
    etag: str
    imports: tuple[str, ...]
    """The files that it imports, if it is a module."""


@dataclass(frozen=True)
class Assets:
    """The files by their paths below ``static``; ``version`` changes with any of them."""

    version: str
    files: dict[str, Asset]

    @classmethod
    def found(cls) -> Assets:
        """Read the files of the dashboard, those of Swagger UI, and the modules of kinds that packages bring."""
        paths = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
        paths |= {f"swagger/{path.name}": path for path in SWAGGER.iterdir() if path.suffix in (".css", ".js")}
        for kind, provided in KINDS.provided.items():
            if (path := provided.declaration.page_file) is not None:
                paths[f"kinds/{kind}.js"] = path
        files = {name: _asset(name, path.read_bytes()) for name, path in sorted(paths.items())}
        tags = "\n".join(f"{name} {file.etag}" for name, file in files.items())
        return cls(f"v-{_digest(tags.encode())}", files)

    @property
    def root(self) -> str:
        """Return the address below which the files lie."""
        return f"/static/{self.version}"

    def address(self, name: str) -> str:
        """Return the address of a file, or of one that a package serves below ``/static``."""
        return f"{self.root if name in self.files else '/static'}/{name}"

    def modules(self, page: str) -> list[str]:
        """Return the modules that a page's module imports, directly or not, nearest first; for a job's page,
        also the modules of all kinds of jobs.
        """
        found = [f"pages/{page}"]
        if page == "job.js":
            found += [name for name in self.files if name.startswith("kinds/")]
        for name in found:
            file = self.files.get(name)
            found += [each for each in (file.imports if file else ()) if each not in found]
        return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _asset(name: str, content: bytes) -> Asset:
    folder, is_module = posixpath.dirname(name), name.endswith(".js")
    named = _IMPORT.findall(content.decode()) if is_module else []
    imports = tuple(posixpath.normpath(posixpath.join(folder, path)) for path in named)
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Asset(content, "text/javascript" if is_module else media_type, f'"{_digest(content)}"', imports)
