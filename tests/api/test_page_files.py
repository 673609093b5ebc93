"""The files that pages of the dashboard name."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.dashboard import pages
from api.dashboard.pages import PAGES, Page


@pytest.fixture(scope="module")
def shells() -> TestClient:
    app = FastAPI(docs_url=None)
    pages.mount(app)
    return TestClient(app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_each_file_that_a_page_names_is_there(shells: TestClient, page: Page) -> None:
    text = shells.get(page.path.replace("{job_id}", "job_00000000000000000000")).text
    named = set(re.findall(r'(?:href|src)="(/static/[^"]+)"', text))
    assert len(named) > 4
    assert [path for path in named if shells.get(path).status_code != 200] == []
