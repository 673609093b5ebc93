/** The log as it is written: follow or pause, one rank or all, lines with a text; the newest of them. */

import { clock, dateTime, many } from "../lib/format.js";
import { KEEP, LogStore, breaking, fromEvent, hasText, isAtLeast, logQuery, passes } from "../lib/log.js";
import { isTerminal } from "../lib/state.js";
import { callLines, jobPath } from "../ui/api.js";
import { fill, h, oncePerFrame, setAttribute, setText } from "../ui/dom.js";
import { downloadLink } from "../ui/parts.js";
import { blank } from "../ui/status.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/log.js").LogLine} LogLine */

const TAIL = 1000;
/** Within this many pixels of the foot, the reader is at the foot. */
const NEAR = 24;
const LEVELS = /** @type {const} */ ([["", "All levels"], ["warning", "Warnings, errors"], ["error", "Errors"]]);
/** After so long without a key the text is searched for, in ms. */
const TYPED_MS = 300;

/** The part of the view above the line that names the cause. */
const ABOVE = 0.6;

export class Log extends Section {
  constructor() {
    super("Log", "log");
    this.store = new LogStore();
    /** @type {LogLine[]} lines that are not on the page yet */
    this.fresh = [];
    this.filter = "all";
    this.text = "";
    this.level = "";
    this.typed = 0;
    /** @type {import("../lib/types.js").Job | null} */
    this.job = null;
    this.following = true;
    this.ended = false;
    this.view = h("div", { class: "lines", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Log lines" });
    this.empty = h("div", {});
    this.select = h("select", { "aria-label": "Rank" }, h("option", { value: "all" }, "All ranks"));
    this.follow = h("button", { class: "tiny", type: "button", "aria-pressed": "true", id: "follow" }, "Following");
    this.body.append(this.view, this.empty);
    this.search = h("input", { type: "search", placeholder: "Search the log", "aria-label": "Search the log" });
    this.levels = h("select", { "aria-label": "Level" }, ...LEVELS.map(([value, words]) => h("option", { value }, words)));
    this.whole = h("span", { class: "whole" });
    this.aside.append(this.search, this.levels, this.select, this.whole, this.follow);
    /** Where it broke. @type {HTMLElement | null} */
    this.broke = null;
    this.height = 0;
    new ResizeObserver(() => this.resized()).observe(this.view);
    this.flush = oncePerFrame(() => this.append());
    this.listen();
  }

  listen() {
    this.select.addEventListener("change", () => {
      this.filter = this.select.value;
      this.reload();
    });
    this.levels.addEventListener("change", () => this.reload());
    this.search.addEventListener("input", () => {
      clearTimeout(this.typed);
      this.typed = setTimeout(() => this.reload(), TYPED_MS);
    });
    this.follow.addEventListener("click", () => this.setFollowing(!this.following));
    this.view.addEventListener("scroll", () => {
      const distance = this.view.scrollHeight - this.view.scrollTop - this.view.clientHeight;
      if (this.following !== distance <= NEAR) this.setFollowing(distance <= NEAR, false);
    });
  }

  /** @param {boolean} following @param {boolean} [jump] */
  setFollowing(following, jump = true) {
    this.following = following;
    setAttribute(this.follow, "aria-pressed", String(following));
    setText(this.follow, following ? "Following" : "Paused");
    if (following && jump) this.toFoot();
  }

  toFoot() {
    this.view.scrollTop = this.view.scrollHeight;
  }

  /** What is not shown cannot be scrolled: that is done when it appears. */
  resized() {
    const appears = this.height === 0 && this.view.clientHeight > 0;
    this.height = this.view.clientHeight;
    if (appears) this.toPlace();
  }

  toPlace() {
    if (this.broke) this.view.scrollTop = this.broke.offsetTop - this.view.offsetTop - ABOVE * this.view.clientHeight;
    else if (this.following) this.toFoot();
  }

  /** @param {import("../lib/types.js").Job} job */
  async fetch(job) {
    this.job = job;
    const { text, filter, level } = this;
    const events = await callLines(jobPath(job.id, `/logs?${logQuery(text, filter, level, TAIL)}`));
    if (text !== this.text || filter !== this.filter || level !== this.level) return;
    const before = this.store;
    this.store = new LogStore(events.map(fromEvent), before.ranks());
    const newest = this.store.lines.at(-1)?.time ?? -Infinity;
    // What arrived while this was fetched.
    for (const line of before.lines) if (line.time > newest && this.isWanted(line)) this.store.add(line);
    this.broke = null;
    this.redraw();
    this.setFollowing(true);
    if (job.state === "failed" && text === "" && level === "") this.toError(job.error?.rank ?? null);
  }

  /** A log of a job that broke opens at the cause, with the last frames above it. @param {number | null} rank */
  toError(rank) {
    const shown = this.store.lines.filter((line) => passes(line, this.filter));
    const line = breaking(shown, rank);
    const place = line && this.view.children[shown.indexOf(line) - Math.max(0, shown.length - KEEP)];
    if (!(place instanceof HTMLElement)) return;
    setAttribute(place, "data-breaking", true);
    this.broke = place;
    this.toPlace();
  }

  /** Fetch what the reader asks for now: the service has lines that this page never saw. */
  reload() {
    this.text = this.search.value;
    this.level = this.levels.value;
    if (this.job !== null) this.fetch(this.job).catch((problem) => this.remark(String(problem.message)));
  }

  /** @param {LogLine} line */
  isWanted(line) {
    return hasText(line, this.text) && isAtLeast(line, this.level);
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type !== "log") return;
    const line = fromEvent(event);
    if (!this.isWanted(line) || !this.store.add(line)) return;
    this.fresh.push(line);
    this.flush();
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    this.ended = isTerminal(job.state);
    this.follow.hidden = this.ended;
    this.describe();
  }

  redraw() {
    this.fresh = [...this.store.lines];
    this.view.replaceChildren();
    this.append();
  }

  append() {
    const lines = this.fresh.filter((line) => passes(line, this.filter));
    this.fresh = [];
    this.view.append(...lines.slice(-KEEP).map(lineElement));
    while (this.view.childElementCount > KEEP) this.view.firstElementChild?.remove();
    if (this.following) this.toFoot();
    this.describe();
  }

  describe() {
    const ranks = this.store.ranks();
    if (this.select.options.length !== ranks.length + 1) this.listRanks(ranks);
    this.select.hidden = ranks.length < 2;
    const count = this.store.lines.length;
    this.view.hidden = count === 0;
    this.remark(count ? `${this.store.dropped || count >= TAIL ? "last " : ""}${many(count, "line")}` : "");
    const isAll = this.text === "" && this.level === "" && this.filter === "all";
    for (const part of [this.search, this.levels, this.whole]) part.hidden = count === 0 && isAll;
    if (this.job && !this.whole.firstChild) {
      const download = { class: "button small", download: `${this.job.id}.log`, title: "All that was printed, as text" };
      this.whole.append(downloadLink(download, jobPath(this.job.id, "/logs"), "Download"));
    }
    const nothing = this.ended ? "This job wrote no log" : "Nothing written yet";
    fill(this.empty, count === 0 && blank(isAll ? nothing : "No line like that"));
  }

  /** @param {(number | null)[]} ranks */
  listRanks(ranks) {
    const options = ranks.map((rank) =>
      rank === null ? h("option", { value: "service" }, "Service") : h("option", { value: rank }, `Rank ${rank}`));
    fill(this.select, h("option", { value: "all" }, "All ranks"), ...options);
    this.select.value = this.filter;
  }
}

/** @param {LogLine} line */
function lineElement(line) {
  return h("div", { class: "line", "data-stream": line.stream },
    h("time", { title: dateTime(line.time) }, clock(line.time)),
    h("span", { class: "rank" }, line.rank === null ? "·" : line.rank),
    h("span", { class: "text" }, line.text));
}
