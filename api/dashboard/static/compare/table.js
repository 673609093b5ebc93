/** The jobs as a table of what they differ in and what came of them, in any order, and as a file. */

import { compared, csv, order, shown } from "../lib/compare.js";
import { duration } from "../lib/format.js";
import { ran } from "../lib/state.js";
import { TOLD_APART, swatchOf } from "../ui/chart.js";
import { fill, h, setAttribute, setText } from "../ui/dom.js";
import { now, stateMark, withHeadings } from "../ui/parts.js";

/** @typedef {import("../lib/types.js").Job} Job */

/** What is told as a duration; and so is each part of a job's time. */
const SECONDS = new Set(["duration", "result.seconds", "result.wall_seconds"]);
const PART = "result.time.";
/** Texts of more signs stand on several lines. */
const LONG = 40;
/** How long a job ran is no result of its own, such as the `seconds` of a training. */
const FIXED = ["job", "state", "duration"];

export class JobTable {
  /**
   * @param {(sort: string) => void} sorted told by which column the user wants it, with a minus for the other way round
   * @param {(name: string | null) => void} pointed told at which job the user points
   */
  constructor(sorted, pointed) {
    this.sorted = sorted;
    this.pointed = pointed;
    /** @type {{head: string[], rows: unknown[][]}} */
    this.sheet = { head: [], rows: [] };
    this.isToldApart = true;
    this.table = h("table", { class: "table cards compared" });
    this.same = h("p", { class: "same muted" });
    const save = h("button", { class: "button small", type: "button" }, "Save as CSV");
    save.addEventListener("click", () => this.save());
    this.element = h("section", { class: "panel", id: "table", "aria-label": "Jobs" },
      h("header", {}, h("h2", {}, "What differs, and what came of it"), h("span", { class: "aside" }, save)),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of jobs" }, this.table), this.same);
  }

  /** @param {Job[]} jobs @param {string[]} names @param {string} sort @param {ReadonlyMap<string, number>} drawn the curve of each job, by the job's name */
  show(jobs, names, sort, drawn) {
    const { columns, same, cells } = compared(jobs);
    const paths = [...FIXED, ...columns.map(({ path }) => path)];
    const numeric = new Set(["duration", ...columns.filter((column) => column.numeric).map(({ path }) => path)]);
    const values = jobs.map((job, index) => new Map([...(cells[index] ?? []),
      ["job", names[index]], ["state", job.state], ["duration", ran(job, now())]]));
    this.isToldApart = drawn.size > 0 && Math.max(...drawn.values()) < TOLD_APART;
    const by = sort.replace(/^-/, "");
    const rows = paths.includes(by) ? order(values.map((row) => row.get(by)), sort.startsWith("-")) : jobs.map((_, index) => index);
    setText(this.same, same.size ? `The same for all: ${[...same].map(([path, value]) => `${bare(path)} ${shown(value)}`).join(", ")}` : "");
    this.same.hidden = same.size === 0;
    fill(this.table,
      h("thead", {}, h("tr", {}, ...paths.map((path) => this.headCell(path, sort, numeric.has(path))))),
      h("tbody", {}, ...rows.map((index) => this.row(jobs, index, values[index] ?? new Map(), paths, numeric, drawn))));
    withHeadings(this.table, (name) => name.replace(/ [▲▼]$/, ""));
    const saved = [...paths, ...same.keys()];
    this.sheet = { head: ["id", ...saved], rows: rows.map((index) => [jobs[index]?.id, ...saved.map((path) => values[index]?.get(path))]) };
  }

  /** @param {string} path @param {string} sort @param {boolean} numeric */
  headCell(path, sort, numeric) {
    const down = sort === `-${path}`;
    const up = sort === path;
    const button = h("button", { type: "button", title: `Sort by ${path}` }, bare(path), h("span", { "aria-hidden": "true" }, up ? " ▲" : down ? " ▼" : ""));
    button.addEventListener("click", () => this.sorted(up ? `-${path}` : path));
    return h("th", { scope: "col", class: numeric ? "right" : null, "aria-sort": up ? "ascending" : down ? "descending" : null,
      "data-of": path.startsWith("result.") ? "result" : null }, button);
  }

  /**
   * @param {Job[]} jobs @param {number} index @param {Map<string, unknown>} values @param {string[]} paths
   * @param {Set<string>} numeric @param {ReadonlyMap<string, number>} drawn
   */
  row(jobs, index, values, paths, numeric, drawn) {
    const job = /** @type {Job} */ (jobs[index]);
    const name = String(values.get("job"));
    const curve = drawn.get(name);
    const link = h("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, name);
    const row = h("tr", { "data-job": job.id }, h("th", { scope: "row" }, this.isToldApart && (curve !== undefined ? swatchOf(curve) : h("span", { class: "swatch none" })), link),
      h("td", {}, stateMark(job.state)),
      ...paths.slice(2).map((path) => cell(values.get(path), numeric.has(path), path === "duration" || path.startsWith("result."), SECONDS.has(path) || path.startsWith(PART))));
    row.addEventListener("pointerenter", () => this.pointed(name));
    row.addEventListener("pointerleave", () => this.pointed(null));
    link.addEventListener("focus", () => this.pointed(name));
    link.addEventListener("blur", () => this.pointed(null));
    return row;
  }

  save() {
    const { head, rows } = this.sheet;
    const address = URL.createObjectURL(new Blob([csv(head, rows)], { type: "text/csv" }));
    const link = document.createElement("a");
    link.href = address;
    setAttribute(link, "download", "jobs.csv");
    link.click();
    URL.revokeObjectURL(address);
  }
}

/** @param {string} path */
const bare = (path) => path.replace(/^result\./, "");

/**
 * A value, whole in its title where the cell has less of it; a number that nobody measured stands as it was written.
 * @param {unknown} value @param {boolean} isRight @param {boolean} isMeasured @param {boolean} [seconds]
 */
function cell(value, isRight, isMeasured, seconds = false) {
  const text = seconds && typeof value === "number" ? duration(value) : isMeasured || typeof value !== "number" || Number.isInteger(value) ? shown(value) : String(value);
  return h("td", { class: isRight ? "right" : text.length > LONG ? "long" : null, title: typeof value === "string" && text !== value ? value : null }, text);
}
