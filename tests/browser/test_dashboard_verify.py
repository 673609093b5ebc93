"""What the page of a verification job says of its instances, searches and layers."""

from __future__ import annotations

import pytest
from fleet import Fleet, paired_spec
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_a_job_about_many_models_says_so(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(paired_spec(fleet.store))
    page.goto(f"/jobs/{attempt.job_id}")
    note = page.locator("#verify .note")
    expect(note).to_have_text("crown · VNN-LIB instances")
    for instance, name in enumerate(["a.onnx one.vnnlib", "a.onnx two.vnnlib", "b c.onnx.gz one.vnnlib"]):
        attempt.bound(instance, 0.5, name=name)
    expect(note).to_have_text("crown · VNN-LIB instances · 2 models · 3 rows")
