/** The queue: who waits, for what, and when their turn may come. */

import { number } from "../lib/format.js";
import { expected } from "../lib/queue.js";
import { call, items } from "./api.js";
import { fill, h, setText } from "./dom.js";
import { withHeadings } from "./parts.js";

/** @typedef {import("../lib/types.js").QueueLine & {kind: string, name: string, owner: string, priority: number}} Line */

const PAGE = 50;
/** As many as one answer may have. */
const MOST = 500;
const COLUMNS = ["Place", "Job", "Owner", "Priority", "Why it waits", "Start"];

export class QueueTable {
  /** @param {Element} element */
  constructor(element) {
    this.note = h("span", { class: "note" });
    this.rows = h("tbody", {});
    this.element = h("section", { class: "panel", id: "queue", "aria-label": "Queue", hidden: true }, h("header", {}, h("h2", {}, "Queue"), this.note),
      this.table = h("table", { class: "table cards queue" },
        h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col", class: name === "Place" || name === "Priority" ? "right" : null }, name)))), this.rows));
    this.more = h("button", { class: "button", type: "button", hidden: true }, "Show more");
    this.more.addEventListener("click", () => {
      this.limit = Math.min(this.limit + 3 * PAGE, MOST);
      void this.refresh();
    });
    element.append(this.element, h("nav", { class: "pager", "aria-label": "Pages" }, this.more));
    this.shown = "";
    this.limit = PAGE;
    /** Jobs that wait for devices or for other jobs. */
    this.waiting = 0;
  }

  async refresh() {
    const page = await call(`/v1/queue?limit=${this.limit}`);
    const lines = /** @type {Line[]} */ (items(page));
    this.waiting = page.pending + page.dependent;
    this.element.hidden = lines.length === 0;
    this.more.hidden = !page.next_cursor || this.limit === MOST;
    const more = page.next_cursor ? `; the first ${lines.length} are shown` : "";
    setText(this.note, `${number(page.pending)} wait for devices, ${number(page.dependent)} for other jobs${more}`);
    const signature = JSON.stringify(lines);
    if (signature === this.shown) return;
    this.shown = signature;
    fill(this.rows, ...lines.map(row));
    withHeadings(this.table);
  }
}

/** @param {Line} line */
function row(line) {
  return h("tr", { "data-job": line.job }, h("td", { class: "right" }, line.place ?? "–"),
    h("td", { class: "title" }, h("a", { href: `/jobs/${encodeURIComponent(line.job)}` }, line.name || line.kind)),
    h("td", { class: "who" }, line.owner), h("td", { class: "right" }, line.priority), h("td", { class: "muted reason" }, line.reason ?? ""),
    h("td", { class: "muted" }, line.place === null ? "after those jobs" : expected(line.start, Date.now())));
}
