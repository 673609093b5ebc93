"""The example specs are what the service accepts, and the README and guides show them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CheckContext
from service.jobs.submission.check import check

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_but_for_the_job_that_it_leaves_open(path: Path) -> None:
    spec = spec_adapter.validate_python(yaml.safe_load(path.read_text()))
    problems = check(spec, CheckContext({"cpu": 4}))
    assert {problem.path for problem in problems} <= {"model.job"}
    assert bool(problems) == ("model.job=ID" in path.read_text())


@pytest.mark.parametrize("page", ["learn/certify-your-network.md", "use/verify.md"])
def test_the_pages_about_own_networks_show_the_example(page: str) -> None:
    assert f"```yaml\n{(ROOT / 'examples' / 'queries.yaml').read_text()}```" in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("name", ["sweep", "chain"])
def test_the_page_about_sweeps_shows_the_examples(name: str) -> None:
    page = (ROOT / "docs" / "use" / "sweeps.md").read_text()
    assert f"```yaml\n{(ROOT / 'examples' / f'{name}.yaml').read_text()}```" in page


@pytest.mark.parametrize("kind", ["train", "verify", "compile"])
def test_the_readme_shows_the_examples(kind: str) -> None:
    assert f"```yaml\n{(ROOT / 'examples' / f'{kind}.yaml').read_text()}```" in (ROOT / "README.md").read_text()
