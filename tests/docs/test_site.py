"""The documents are a site: every link in it leads somewhere, and its references have what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from service.jobs.kinds.registry import KINDS

ROOT = Path(__file__).parents[2]
OTHER_HOSTS = re.compile(r"""(?:src|href)=["']?(https?://[^"'> ]+)""")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: strictly, so that a link to nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
    quiet = outer | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_a_page_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*>", page.read_text())
        assert [tag for tag in loaded if OTHER_HOSTS.search(tag) and "canonical" not in tag] == [], page


@pytest.mark.parametrize("kind", ["train", "verify", "compile", "run", "script"])
def test_every_field_of_a_spec_has_its_meaning_and_an_example(site: Path, kind: str) -> None:
    text = unescape((site / "reference" / f"{kind}.html").read_text())
    rows = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]
    fields = {re.sub(r"<.*?>", "", row[0]): row for row in rows if len(row) == 5}
    assert set(KINDS.declaration(kind).config.model_json_schema()["properties"]) <= set(fields)
    assert [name for name, row in fields.items() if not row[3] or not row[4]] == []


def test_every_call_is_in_the_reference(site: Path) -> None:
    text = unescape((site / "reference" / "rest.html").read_text())
    for call in ("POST /v1/jobs", "GET /v1/jobs/{job_id}/notices", "GET /healthz"):
        assert f">{call}</code>" in text
