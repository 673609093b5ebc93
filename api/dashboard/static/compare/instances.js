/** What verification jobs found, as a matrix of instances and jobs. */

import { duration, many, number } from "../lib/format.js";
import { heads, matrix, totals } from "../lib/compare.js";
import { isTerminal } from "../lib/state.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, setText } from "../ui/dom.js";
import { stateMark, withHeadings } from "../ui/parts.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/types.js").BoundsRow} BoundsRow */

/** Jobs that stand beside each other, and rows of each job; the files of the jobs have the rest. */
const MOST_JOBS = 12;
const MOST_ROWS = 1000;

export class Instances {
  constructor() {
    /** @type {Job[]} */
    this.jobs = [];
    /** @type {string[]} */
    this.names = [];
    /** @type {Map<string, BoundsRow[]>} */
    this.rows = new Map();
    /** Jobs that have more rows. @type {Set<string>} */
    this.cut = new Set();
    this.left = 0;
    this.differing = h("input", { type: "checkbox" });
    this.differing.addEventListener("change", () => this.draw());
    this.note = h("span", { class: "note" });
    this.table = h("table", { class: "table cards compared" });
    this.element = h("section", { class: "panel", id: "instances", "aria-label": "Instances", hidden: true },
      h("header", {}, h("h2", {}, "Instances"), this.note,
        h("label", { class: "aside" }, this.differing, "Only where they differ")),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Verdicts" }, this.table));
  }

  /** @param {Job[]} jobs @param {string[]} names */
  async show(jobs, names) {
    const found = jobs.flatMap((job, index) => (job.kind === "verify" && !job.children ? [{ job, name: names[index] ?? job.id }] : []));
    const told = found.slice(0, MOST_JOBS);
    await Promise.all(told.map(async ({ job }) => {
      if (this.rows.has(job.id) && isTerminal(job.state)) return;
      const page = await call(jobPath(job.id, `/bounds?limit=${MOST_ROWS}`));
      this.rows.set(job.id, page.items);
      if (page.next_cursor !== null) this.cut.add(job.id);
    }));
    this.left = found.length - told.length;
    this.jobs = told.map(({ job }) => job);
    this.names = told.map(({ name }) => name);
    this.element.hidden = told.length === 0;
    this.draw();
  }

  draw() {
    const all = matrix(this.jobs.map((job) => this.rows.get(job.id) ?? []));
    const differing = all.filter((instance) => !instance.agreed);
    const shown = (this.differing.checked ? differing : all).slice(0, MOST_ROWS);
    const isCut = this.jobs.some((job) => this.cut.has(job.id));
    const first = [isCut && `the first ${number(all.length)} instances`, this.left > 0 && `the first ${this.jobs.length} jobs`].filter(Boolean).join(" of ");
    setText(this.note, `${first || many(all.length, "instance")}, verdicts differ at ${differing.length}`);
    fill(this.table,
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "instance"), ...heads(this.jobs, this.names).map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", { class: "sums" }, h("tr", {}, h("th", { scope: "row" }, isCut ? "of these" : "in all"), ...totals(all, this.jobs.length).map((told) => h("td", {}, told)))),
      h("tbody", {}, ...shown.map(({ name, found }) => h("tr", {}, h("th", { scope: "row" }, name), ...found.map(cell)))));
    withHeadings(this.table);
  }
}

/** @param {import("../lib/compare.js").Instance["found"][number]} found */
const cell = (found) =>
  found
    ? h("td", { title: duration(found.seconds) }, stateMark(found.verdict), h("span", { class: "muted margin" }, found.margin === null ? "" : number(found.margin)))
    : h("td", { class: "muted" }, "–");
