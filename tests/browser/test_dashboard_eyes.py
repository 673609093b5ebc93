"""What eyes and screen readers get of a page: names of what can be used, whole words, pictures that show something."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from dashboard_service import Complaints, shown
from ended_pages import ended_pages
from fleet import Fleet
from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NAMED = {"button", "link", "textbox", "searchbox", "checkbox", "combobox", "slider", "spinbutton", "image", "dialog"}
"""Roles of which a screen reader says nothing useful without a name."""
TRIES, PAUSE_MS = 60, 250
"""A chart is drawn some frames after it is seen, later where others have the processors."""
SOUND = """() => {
  const told = [];
  const found = (selector) => [...document.querySelectorAll(selector)];
  const ids = found("[id]").map((each) => each.id);
  told.push(...ids.filter((id, at) => ids.indexOf(id) !== at).map((id) => `two have the id ${id}`));
  const headings = found("h1, h2, h3, h4").filter((each) => each.checkVisibility({ visibilityProperty: true }));
  const levels = headings.map((each) => Number(each.tagName[1]));
  levels.forEach((level, at) => {
    if (level > (levels[at - 1] ?? 0) + 1) told.push(`heading ${level} after ${levels[at - 1] ?? "none"}`);
  });
  if (levels.filter((level) => level === 1).length !== 1) told.push("not one first heading");
  if (found("main").length !== 1 || !document.documentElement.lang || !document.title) told.push("no frame");
  told.push(...found("[tabindex]").filter((each) => each.tabIndex > 0).map((each) => `tabindex ${each.tabIndex}`));
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
    const lost = found(`[${name}]`).flatMap((each) => each.getAttribute(name).split(" "))
      .filter((id) => !document.getElementById(id));
    told.push(...lost.map((id) => `${name} ${id} leads nowhere`));
  }
  return told;
}"""
CUT = """() => [...document.querySelectorAll("main *, header *")].filter((each) => {
  const { overflowX, display } = getComputedStyle(each);
  return each.checkVisibility({ visibilityProperty: true }) && each.textContent.trim() && display !== "inline"
    && each.scrollWidth > each.clientWidth + 1 && ["hidden", "clip"].includes(overflowX)
    && !each.matches(".unseen, .skip, select, thead") && !each.closest("[title]") && !each.querySelector("[title]");
}).map((each) => `cut: ${each.tagName}.${each.className} ${each.textContent.trim().slice(0, 40)}`)"""
SHORT = ".duration, .age, .state, .badge, .numbers, .chip, .owner a"
"""What is short enough to be read as it stands."""
WHOLE = """(short) => [...document.querySelectorAll(short)].filter((each) => {
  const { display, textOverflow } = getComputedStyle(each);
  const says = each.matches(".chip, .owner a") && each.title && textOverflow === "ellipsis";
  return each.checkVisibility({ visibilityProperty: true }) && display !== "inline" && !says
    && each.scrollWidth > each.clientWidth + 1;
}).map((each) => `not whole: ${each.className} ${each.textContent.trim().slice(0, 40)}`)"""
OUTSIDE = """() => {
  const wide = [...document.querySelectorAll("main .scroll, main table, main .legend")].filter((each) =>
    innerWidth < 640 && each.checkVisibility() && each.scrollWidth > each.clientWidth + 1);
  const beyond = [...document.querySelectorAll("main .panel :is(td, th, meter, button, .rail)")].filter((each) =>
    each.checkVisibility() && !each.closest(".scroll, thead")
    && each.getBoundingClientRect().right > each.closest(".panel").getBoundingClientRect().right);
  return [...wide, ...beyond].map((each) => `outside: ${each.tagName}.${each.className} ${each.scrollWidth} of `
    + each.clientWidth);
}"""
MISTAKEN = """() => {
  const link = getComputedStyle(document.querySelector("header a.brand svg")).color;
  return [...document.querySelectorAll("main .line .text, main p, main td, main .muted")].filter((each) =>
    each.checkVisibility() && each.textContent.trim() && getComputedStyle(each).color === link
    && !each.closest("a, button"))
    .map((each) => `looks like a link: ${each.className} ${each.textContent.trim().slice(0, 40)}`);
}"""
COLOURS = """() => {
  const seen = new Map();
  for (const each of document.querySelectorAll(".state[data-state], .strip [data-state]")) {
    const style = getComputedStyle(each);
    const colour = each.matches(".strip *") ? style.backgroundColor : style.color;
    const state = each.dataset.state;
    seen.set(state, (seen.get(state) ?? new Set()).add(colour));
  }
  return [...seen].filter(([, colours]) => colours.size > 1)
    .map(([state, colours]) => `${state} in ${[...colours].join(" and ")}`);
}"""
BLANK = """() => [...document.querySelectorAll("canvas")].filter((each) => {
  if (!each.checkVisibility()) return false;
  const { data } = each.getContext("2d").getImageData(0, 0, each.width, each.height);
  return !data.some((value, at) => at % 4 === 3 && value);
}).map((each) => `nothing drawn: ${each.getAttribute("aria-label")}`)"""
OVERLAID = """() => {
  const clipped = ({ left, right, top, bottom }, node) => {
    for (let one = node; one && one !== document.body; one = one.parentElement) {
      if (getComputedStyle(one).overflowX === "visible") continue;
      const box = one.getBoundingClientRect();
      [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
      [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
    }
    return { left, right, top, bottom, node, words: node.textContent.trim().slice(0, 30) };
  };
  const places = [];
  for (const each of document.querySelectorAll("main *, header *")) {
    if (!each.checkVisibility({ visibilityProperty: true }) || each.closest(".unseen, .skip, svg, option")) continue;
    for (const node of each.childNodes) {
      if (node.nodeType !== 3 || !node.data.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      places.push(...[...range.getClientRects()].map((rect) => clipped(rect, each)));
    }
  }
  const seen = places.filter(({ left, right, top, bottom }) => right - left > 1 && bottom - top > 1);
  seen.sort((one, other) => one.top - other.top);
  return seen.flatMap((one, at) => {
    const below = seen.slice(at + 1);
    const end = below.findIndex((other) => other.top >= one.bottom - 4);
    return below.slice(0, end < 0 ? undefined : end)
      .filter((other) => other.node !== one.node)
      .filter((other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2)
      .map((other) => `over each other: ${one.words} | ${other.words}`);
  });
}"""
SCROLLED = """async () => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  for (let at = 0; at < document.body.scrollHeight; at += 600) {
    scrollTo(0, at);
    await frame();
  }
  scrollTo(0, 0);
  await frame();
}"""
SHADES = """async (address) => {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  const counts = Array(256).fill(0);
  for (let at = 1; at < data.length; at += 4) counts[data[at]] += 1;
  return [image.width, counts];
}"""


@pytest.fixture
def addresses(fleet: Fleet, complaints: Complaints) -> dict[str, str]:
    complaints.expected = ("404", "willReadFrequently")  # an address without a page; the test's own look at charts
    return ended_pages(fleet) | {"login": "/login", "nope": "/nope"}


def test_all_that_can_be_used_has_a_name_and_all_headings_are_in_order(page: Page, addresses: dict[str, str]) -> None:
    told: list[str] = []
    del addresses["docs"]  # the markup there is another project's
    for name, path in addresses.items():
        shown(page, path)
        told += [f"{name}: {what}" for what in [*page.evaluate(SOUND), *nameless(page)]]
    assert not told, "\n".join(told)


def nameless(page: Page) -> list[str]:
    """What can be used on a page and has no name, as the browser tells it to screen readers."""
    session = page.context.new_cdp_session(page)
    nodes: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    silent = [node for node in nodes if not node["ignored"] and not node.get("name", {}).get("value", "").strip()]
    return [f"a nameless {role}" for node in silent if (role := node["role"]["value"]) in NAMED]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_each_page_is_a_picture_in_which_all_is_whole(
    page: Page, bench: Page, addresses: dict[str, str], width: int, scheme: Any
) -> None:
    """No word is cut that no title has whole, none lies over another or outside, a verdict has one colour, only
    links look like links, and charts are drawn, in the colours of the theme.
    """
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    told: list[str] = []
    for name, path in addresses.items():
        shown(page, path)
        scrolled(page)
        found = [
            what
            for script in (CUT, WHOLE, OUTSIDE, MISTAKEN, COLOURS, BLANK, OVERLAID)
            for what in page.evaluate(script, SHORT)
        ]
        picture = f"data:image/png;base64,{base64.b64encode(page.screenshot(full_page=True)).decode()}"
        found += odd(*bench.evaluate(SHADES, picture), width=width, scheme=scheme)
        told += [f"{name}: {what}" for what in found]
    assert not told, "\n".join(told)


def scrolled(page: Page) -> None:
    """Scroll through a page until its charts are drawn: that is done when they are seen."""
    for _ in range(TRIES):
        page.evaluate(SCROLLED)
        if not page.evaluate(BLANK):
            return
        page.wait_for_timeout(PAUSE_MS)


def odd(wide: int, counts: list[int], *, width: int, scheme: str) -> list[str]:
    """What is wrong with a picture of a page by its width and its shades: its ground, or that nothing is on it."""
    ground = max(range(256), key=counts.__getitem__)
    return [
        *([] if wide == width else [f"{wide} pixels wide"]),
        *([] if (ground > 200) == (scheme == "light") else [f"a ground of {ground} in {scheme}"]),
        *([] if sum(count > 0 for count in counts) > 20 else ["an empty picture"]),
    ]
