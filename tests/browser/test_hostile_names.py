"""Names that somebody else chose, on every page: they are shown as words, which neither act nor lead away.

They are written past the checks of submission, as jobs of earlier versions and hosts of others may have them.
"""

from __future__ import annotations

import io
import json
from urllib.parse import quote

import pytest
from dashboard_service import Complaints, shown
from ended_pages import ended_pages
from fleet import Fleet, event, train_spec, verify_spec
from playwright.sync_api import Page, expect
from redis import Redis

from api.dashboard.pages import PAGES
from service.jobs.records import JobError
from service.jobs.store import JobFilter

pytestmark = pytest.mark.browser

MARKUP = (
    """<img src=x onerror="window.hit=1"><svg onload=window.hit=1><script>window.hit=1</script>"'`${window.hit=1}"""
)
TURNED = "\u202egnp\u2066\u200f.exe\x1b[2J"
NAME = f"{MARKUP}{TURNED}{'W' * 4000}"
SHORT = f"{MARKUP}{TURNED}"[:200]
SCRIPT = "javascript:window.hit=1"
JOBS = ("train", "verify", "compile", "failed", "sweep", "hostile train", "hostile verify")
NAMED_LATE = ("train", "verify")
"""Pages of jobs that are used by others, or use them: names of those come after the page."""
BUILT_IN = ("__proto__", "constructor", "toString")
FOUND = r"""() => {
  const told = [];
  if (window.hit !== undefined) told.push("a script ran");
  const acting = "main img, main script:not([src^='/static/']), main iframe, [onload], [onerror]";
  for (const each of document.querySelectorAll(acting)) told.push(`there is a ${each.tagName}`);
  for (const each of document.querySelectorAll("a, area, form, button, use, image"))
    for (const name of ["href", "xlink:href", "action", "formaction"]) {
      const leads = each.getAttribute(name);
      const { protocol, origin } = leads === null ? location : new URL(leads, location.href);
      if (protocol !== "blob:" && origin !== location.origin) told.push(`a ${each.tagName} leads to ${leads}`);
    }
  const texts = [document.title, document.body.innerText, ...[...document.querySelectorAll("[title], [aria-label]")]
    .flatMap((each) => [each.title ?? "", each.getAttribute("aria-label") ?? ""])];
  const raw = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]/;
  for (const text of texts.filter((each) => raw.test(each))) told.push(`raw: ${JSON.stringify(text.match(raw)[0])}`);
  const holds = (each) => getComputedStyle(each).overflowX !== "visible";
  for (const each of document.querySelectorAll("body *")) {
    if (!each.checkVisibility({ visibilityProperty: true }) || each.closest("svg, .unseen, .skip")) continue;
    let outer = each.parentElement;
    while (outer && !holds(outer)) outer = outer.parentElement;
    const { right } = each.getBoundingClientRect();
    if (!outer && right > innerWidth + 1) told.push(`${each.tagName}.${each.className} ends at ${right}`);
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) told.push(`the page is ${wide} wide`);
  return [...new Set(told)];
}"""


def hostile_pages(fleet: Fleet, redis: Redis) -> dict[str, str]:
    """Return the address of a page of every kind, by name, on which every word is somebody else's."""
    fleet.host("gpu-b", cuda=[SHORT], cpu=1)
    pages = ended_pages(fleet)
    train = fleet.run(train_spec(SCRIPT))
    train.emit(event("metric", 0, step=1, values={SHORT: 1.0, **dict.fromkeys(BUILT_IN, 2.0)}))
    train.emit(event("span", 0, name=SHORT, start=1.0, end=2.0), event("phase", 0, name=SHORT))
    train.log(NAME)
    for name in (SCRIPT, f"{MARKUP[:80].replace('/', '')}.txt", *BUILT_IN):
        train.artifact(name, b"x", "text/html")
    train.succeed({SHORT: SHORT, "nested": dict.fromkeys(BUILT_IN, SCRIPT)})
    verify = fleet.run(verify_spec())
    verify.bound(0, 0.5, name=SHORT, decided_by=SHORT, method=SHORT)
    verify.fail(JobError(type=SHORT, message=NAME, rank=0, traceback_artifact=f"//example.org/{SCRIPT}"))
    fleet.submit(train_spec(parallel={"dp_shard": 8}, device="cuda"))
    fleet.store.files.add(io.BytesIO(b"x"), "application/octet-stream")
    fleet.store.keys.create(MARKUP[:60], ("read",))
    for job in fleet.store.jobs.list(JobFilter(), limit=100).items:
        labels = json.dumps({SCRIPT: NAME, **dict.fromkeys(BUILT_IN, SHORT)})
        redis.hset(f"trivet:job:{job.id}", mapping={"name": NAME, "labels": labels, "owner": NAME, "reason": NAME})
    more = {
        "login": f"/login?next={quote(f'{SCRIPT}//{MARKUP}')}",
        "search": f"/?q={quote(MARKUP)}",
        "callback": "/login/callback",
        "docs": "/docs",
        "nope": f"/nope/{SCRIPT}",
    }
    return pages | more | {"hostile train": f"/jobs/{train.job_id}", "hostile verify": f"/jobs/{verify.job_id}"}


def test_hostile_names_are_words_on_every_page(page: Page, fleet: Fleet, redis: Redis, complaints: Complaints) -> None:
    complaints.expected = ("404", "willReadFrequently", "400", "provider")
    pages, told = hostile_pages(fleet, redis), list[str]()
    page.on("dialog", lambda dialog: told.append(f"a dialog: {dialog.message}"))
    for name, path in pages.items():
        shown(page, path)
        if name in NAMED_LATE:
            expect(page.locator(".need a").first).to_contain_text(MARKUP[:20])
        told += [f"{name}: {what}" for what in page.evaluate(FOUND)]
        if name in ("jobs", "compare", *JOBS):
            expect(page.locator("main")).to_contain_text(MARKUP[:20])
        assert page.url.split("?")[0].endswith(path.split("?")[0]), "nothing led away"
    assert not told, "\n".join(told)
    visited = {path.split("?")[0] for path in pages.values()}
    assert all(each.path in visited or "{" in each.path for each in PAGES)
