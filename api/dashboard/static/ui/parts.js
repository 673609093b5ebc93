/** Small pieces that several pages show: state marks, progress bars, labels, times that keep counting. */

import { ago, dateTime, duration, percent } from "../lib/format.js";
import { answer } from "../lib/headline.js";
import { fraction, progressWords, ran, wholePercent } from "../lib/state.js";
import { admitted } from "./api.js";
import { h, setAttribute, setText } from "./dom.js";
import { notify } from "./status.js";

/** @typedef {import("../lib/types.js").Job} Job */

/**
 * A link that saves an artifact. A click asks for a ticket first, since a link sends no header.
 * @param {Record<string, string | number | boolean | null | undefined>} attributes
 * @param {string} path
 * @param {string} words
 */
export function downloadLink(attributes, path, words) {
  const link = h("a", { ...attributes, href: path }, words);
  link.addEventListener("click", async (event) => {
    event.preventDefault();
    try {
      const saved = h("a", { href: await admitted(path), download: attributes.download ?? "" });
      saved.click();
    } catch (error) {
      notify(error instanceof Error ? error.message : String(error), "error");
    }
  });
  return link;
}

/**
 * Gives each cell the heading of its column, which narrow screens show before it, where rows are cards.
 * @param {HTMLTableElement} table
 * @param {(heading: string) => string} [named]
 */
export function withHeadings(table, named = (heading) => heading) {
  const names = [...(table.tHead?.rows[0]?.cells ?? [])].map((cell) => (cell.querySelector(".unseen") ? "" : named(cell.textContent?.trim() ?? "")));
  for (const { cells } of [...table.tBodies].flatMap((body) => [...body.rows])) {
    if (cells.length > 1) [...cells].forEach((cell, index) => setAttribute(cell, "data-label", names[index] || null));
  }
}

/** The present, in Unix seconds. */
export const now = () => Date.now() / 1000;

/** @param {string} state */
export function stateMark(state) {
  const mark = h("span", { class: "state" });
  updateStateMark(mark, state);
  return mark;
}

/**
 * The badge of a job's answer, which stands beside its state.
 * @param {HTMLElement} badge
 * @param {Job} job
 */
export function updateBadge(badge, job) {
  const told = answer(job);
  badge.hidden = told === null;
  setAttribute(badge, "data-tone", told?.tone);
  setText(badge, told?.words ?? "");
}

/** @param {Element} mark @param {string} state */
export function updateStateMark(mark, state) {
  setAttribute(mark, "data-state", state);
  setText(mark, state);
}

/** A progress bar with its numbers; hidden while there is nothing to tell. */
export class ProgressBar {
  constructor() {
    this.bar = h("span", { class: "bar" });
    this.words = h("span", { class: "numbers" });
    this.element = h("div", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 },
      h("span", { class: "track" }, this.bar), this.words);
  }

  /** @param {Job} job */
  update(job) {
    const part = fraction(job);
    this.element.hidden = part === null;
    if (part === null || !job.progress) return;
    this.bar.style.setProperty("width", `${(part * 100).toFixed(2)}%`);
    setAttribute(this.element, "data-state", job.state);
    setAttribute(this.element, "aria-valuenow", wholePercent(part));
    setAttribute(this.element, "aria-valuetext", progressWords(job.progress));
    setAttribute(this.element, "title", progressWords(job.progress));
    setText(this.words, percent(wholePercent(part) / 100));
  }
}

/** @param {Record<string, string>} labels */
export const labelChips = (labels) =>
  Object.entries(labels).map(([key, value]) =>
    h("a", { class: "chip", href: `/?label=${encodeURIComponent(`${key}=${value}`)}`, title: "jobs with this label" },
      h("span", { class: "muted" }, key), value && ` ${value}`),
  );

/** @type {Map<Element, () => string>} */
const counting = new Map();

/**
 * Keeps the text of an element up to date once a second, for as long as it is on the page.
 * @param {Element} element
 * @param {() => string} text
 */
export function keepCounting(element, text) {
  counting.set(element, text);
  setText(element, text());
}

window.setInterval(() => {
  for (const [element, text] of counting) {
    if (element.isConnected) setText(element, text());
    else counting.delete(element);
  }
}, 1000);

/** @param {Element} element @param {number | null} then Unix seconds */
export function showAge(element, then) {
  setAttribute(element, "title", dateTime(then));
  keepCounting(element, () => (then === null ? "–" : ago(then, now())));
}

/** @param {Element} element @param {Job} job */
export const showDuration = (element, job) => keepCounting(element, () => duration(ran(job, now())));
