/** The queue: who waits, for what, and when their turn may come. */

import { number } from "../lib/format.js";
import { expected } from "../lib/queue.js";
import { call, items } from "./api.js";
import { fill, h, setText } from "./dom.js";

/** @typedef {import("../lib/types.js").QueueLine & {kind: string, name: string, owner: string, priority: number}} Line */

const SHOWN = 50;
const COLUMNS = ["Place", "Job", "Owner", "Priority", "Waits for", "May start"];

export class QueueTable {
  /** @param {Element} element */
  constructor(element) {
    this.note = h("span", { class: "note" });
    this.rows = h("tbody", {});
    this.element = h("section", { class: "panel", id: "queue", "aria-label": "Queue", hidden: true }, h("header", {}, h("h2", {}, "Queue"), this.note),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Waiting jobs" }, h("table", { class: "table queue" },
        h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col", class: name === "Place" || name === "Priority" ? "right" : null }, name)))), this.rows)));
    element.append(this.element);
    this.shown = "";
  }

  async refresh() {
    const page = await call(`/v1/queue?limit=${SHOWN}`);
    const lines = /** @type {Line[]} */ (items(page));
    this.element.hidden = lines.length === 0;
    const more = page.next_cursor ? `; the first ${lines.length} are shown` : "";
    setText(this.note, `${number(page.pending)} wait for devices, ${number(page.dependent)} for other jobs${more}`);
    const signature = JSON.stringify(lines);
    if (signature === this.shown) return;
    this.shown = signature;
    fill(this.rows, ...lines.map(row));
  }
}

/** @param {Line} line */
function row(line) {
  return h("tr", { "data-job": line.job }, h("td", { class: "right" }, line.place ?? "–"),
    h("td", {}, h("a", { href: `/jobs/${encodeURIComponent(line.job)}` }, line.name || line.kind)),
    h("td", {}, line.owner), h("td", { class: "right" }, line.priority), h("td", { class: "muted" }, line.reason ?? ""),
    h("td", { class: "muted" }, line.place === null ? "after those jobs" : expected(line.start, Date.now())));
}
