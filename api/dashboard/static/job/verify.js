/** Verdicts, margins and bounds of a verification job, row by row as they are found. */

import { VERDICTS, counts, isNumber, pair, span, telling } from "../lib/bounds.js";
import { duration, fixed, many, number } from "../lib/format.js";
import { extent } from "../lib/scales.js";
import { isTerminal } from "../lib/state.js";
import { call, items, jobPath } from "../ui/api.js";
import { fill, h, keyed, oncePerFrame, setAttribute, setText } from "../ui/dom.js";
import { Margins, TONES } from "../ui/margins.js";
import { stateMark, updateStateMark } from "../ui/parts.js";
import { rail } from "../ui/rail.js";
import { blank } from "../ui/status.js";
import { OutputBounds } from "./outputs.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").BoundsRow} BoundsRow */

const PAGE = 500;
const ROWS_SHOWN = 100;
/**
 * @typedef {{element: HTMLElement, update: (row: BoundsRow) => void}} Cell
 * @typedef {{name: string, right?: boolean, cell: (verify: Verify) => Cell}} TableColumn a heading, over numbers where it is on the right
 */

/** @type {readonly TableColumn[]} */
const COLUMNS = [
  { name: "Instance", cell: (verify) => verify.instanceCell() },
  { name: "Verdict", cell: () => verdictCell() },
  { name: "Decided by", cell: () => decidedByCell() },
  { name: "Margin", right: true, cell: () => numberCell((row) => fixed(row.margin)) },
  { name: "Lower", right: true, cell: () => numberCell((row) => fixed(span(row)[0])) },
  { name: "Outputs", cell: (verify) => verify.outputsCell() },
  { name: "Upper", cell: () => numberCell((row) => fixed(span(row)[1]), null) },
  { name: "Domains", right: true, cell: () => numberCell((row) => number(row.domains)) },
  { name: "Time", right: true, cell: () => numberCell((row) => duration(row.seconds)) },
];

export class Verify extends Section {
  /** @param {(instance: number) => void} [chosen] told which instance the user looks at */
  constructor(chosen = () => {}) {
    super("Verification", "verify");
    this.chosen = chosen;
    /** @type {Map<number, BoundsRow>} */
    this.rows = new Map();
    /** @type {Map<string, {element: Element, update: (row: BoundsRow) => void}>} */
    this.lines = new Map();
    this.filter = "all";
    this.limit = ROWS_SHOWN;
    this.ended = false;
    /** @type {import("../lib/types.js").Job["spec"]} */
    this.spec = {};
    /** @type {[number, number]} of the bars in the table */
    this.scale = [0, 1];
    /** Names of models and of queries, as short as they can be told apart. */
    this.short = { model: telling([]), query: telling([]) };
    this.tally = h("div", { class: "tally", role: "group", "aria-label": "Verdicts; choose one to filter the table" });
    this.strip = h("div", { class: "strip", "aria-hidden": "true" });
    this.unit = h("span", { class: "unit" });
    this.margins = new Margins((row) => this.choose(row));
    this.outputs = new OutputBounds();
    this.tbody = h("tbody", {});
    this.more = h("button", { class: "button small", type: "button" }, "Show more rows");
    this.empty = h("div", {});
    this.figure = this.plot();
    this.content = h("div", {}, this.tally, this.strip, this.figure, this.outputs.element, this.table(), this.more);
    this.body.append(this.content, this.empty);
    this.more.addEventListener("click", () => {
      this.limit += PAGE;
      this.update();
    });
    this.draw = oncePerFrame(() => this.update());
  }

  plot() {
    const order = h("button", { class: "tiny", type: "button", "aria-pressed": "false" }, "sort by margin");
    order.addEventListener("click", () => {
      this.margins.order = this.margins.order === "instance" ? "margin" : "instance";
      setAttribute(order, "aria-pressed", String(this.margins.order === "margin"));
      this.margins.set(this.rows.values());
    });
    return h("figure", { class: "chart wide" }, h("figcaption", {}, h("span", { class: "title" }, "Margin per instance"),
      this.unit, order), this.margins.canvas);
  }

  table() {
    const head = h("tr", {}, ...COLUMNS.map(({ name, right }) => h("th", { scope: "col", class: right ? "right" : null }, name)));
    return h("div", { class: "scroll" }, h("table", { class: "table cards rows" }, h("thead", {}, head), this.tbody));
  }

  /** @param {import("../lib/types.js").Job} job */
  async fetch(job) {
    /** @type {Map<number, BoundsRow>} */
    const rows = new Map();
    let cursor = "";
    do {
      const page = await call(jobPath(job.id, `/bounds?limit=${PAGE}${cursor && `&cursor=${encodeURIComponent(cursor)}`}`));
      for (const row of items(page)) rows.set(row.instance, row);
      cursor = page.next_cursor ?? "";
    } while (cursor);
    this.rows = rows;
    this.update();
    const asked = rows.get(Number(/^#instance-(\d+)$/.exec(location.hash)?.[1] ?? Number.NaN));
    if (asked && this.outputs.element.hidden) this.choose(asked);
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type !== "bound") return;
    this.rows.set(event.instance, /** @type {any} */ (event));
    this.draw();
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    this.ended = isTerminal(job.state);
    this.spec = job.spec;
    this.draw();
  }

  update() {
    const all = [...this.rows.values()].sort((a, b) => a.instance - b.instance);
    this.content.hidden = all.length === 0;
    fill(this.empty, all.length === 0 && blank(this.ended ? "No instance was bounded" : "No bounds yet",
      this.ended ? "" : "Rows appear as instances are bounded."));
    this.count(all);
    this.remark([method(this.spec), question(this.spec.property ?? {}, all), all.length > 0 && many(all.length, "row")].filter(Boolean).join(" · "));
    this.margins.set(all);
    this.figure.hidden = this.ended && all.length < 2;
    setText(this.unit, `lower bound, in the colour of the verdict${all.every((row) => isNumber(row.margin)) ? "" : "; × has no margin"}`);
    this.scale = extent([...all.map((row) => span(row).filter(isNumber)), [0]]) ?? [0, 1];
    const names = all.map((row) => this.named(row));
    this.short = { model: telling(names.map(([model]) => model)), query: telling(names.map(([, query]) => query)) };
    const passing = all.filter((row) => this.filter === "all" || row.verdict === this.filter);
    keyed(this.tbody, passing.slice(0, this.limit), (row) => String(row.instance), () => this.line(), this.lines);
    this.more.hidden = passing.length <= this.limit;
  }

  /** @param {BoundsRow[]} all */
  count(all) {
    const found = counts(all);
    if (this.tally.childElementCount === 0) {
      fill(this.tally, ...VERDICTS.map((verdict) => this.counter(verdict)));
      fill(this.strip, ...VERDICTS.map((verdict) => h("i", { "data-state": verdict })));
    }
    VERDICTS.forEach((verdict, index) => {
      const button = this.tally.children[index];
      const number = button?.querySelector("strong");
      if (!button || !number) return;
      setText(number, String(found[verdict] ?? 0));
      setAttribute(button, "aria-pressed", String(this.filter === verdict));
      const part = /** @type {HTMLElement} */ (this.strip.children[index]);
      part.style.setProperty("flex-grow", String(found[verdict] ?? 0));
      part.hidden = !found[verdict];
    });
  }

  /** @param {string} verdict */
  counter(verdict) {
    const button = h("button", { type: "button", "data-verdict": verdict }, h("strong", {}, "0"), stateMark(verdict));
    button.addEventListener("click", () => {
      this.filter = this.filter === verdict ? "all" : verdict;
      this.update();
    });
    return button;
  }

  /** Of its model, or of its query where all are about one model; and of what else tells rows apart. @param {BoundsRow} row @returns {[string, string]} */
  named(row) {
    return this.spec.property?.instances ? pair(row.name) : [row.name ?? "", sample(row)];
  }

  line() {
    const cells = COLUMNS.map((column) => column.cell(this));
    cells.forEach((cell, index) => setAttribute(cell.element, "data-label", COLUMNS[index]?.name));
    const element = h("tr", {}, ...cells.map((cell) => cell.element));
    /** @param {BoundsRow} row */
    const update = (row) => {
      setAttribute(element, "data-instance", row.instance);
      for (const cell of cells) cell.update(row);
    };
    return { element, update };
  }

  /** @returns {Cell} */
  instanceCell() {
    const open = h("button", { class: "link cut", type: "button" });
    const query = h("span", { class: "cut muted" });
    const element = h("td", { class: "instance" }, open, query);
    /** @param {BoundsRow} row */
    const update = (row) => {
      open.onclick = () => this.choose(row);
      const [model, asked] = this.named(row);
      setText(open, model ? `${row.instance} · ${this.short.model(model)}` : String(row.instance));
      setText(query, this.short.query(asked));
      setAttribute(element, "title", row.name);
    };
    return { element, update };
  }

  /** @returns {Cell} */
  outputsCell() {
    const element = h("td", { class: "bounds" });
    return { element, update: (row) => fill(element, this.bar(row)) };
  }

  /** From the least lower to the greatest upper bound, on the scale of all rows; nothing where nothing was bounded. @param {BoundsRow} row */
  bar(row) {
    const [from, to] = this.scale;
    const [low, high] = span(row);
    if (row.lower.length === 0) return false;
    const share = (/** @type {number} */ value) => (value - from) / (to - from || 1);
    return rail(share(low ?? from), share(high ?? to), { zero: share(0), tone: TONES[row.verdict] });
  }

  /** @param {BoundsRow} row */
  choose(row) {
    history.replaceState(null, "", `#instance-${row.instance}`);
    this.outputs.show(row);
    this.margins.mark(row.instance);
    this.chosen(row.instance);
    for (const line of this.tbody.children) {
      setAttribute(line, "aria-selected", line.getAttribute("data-instance") === String(row.instance) ? "true" : null);
    }
  }
}

/** @returns {Cell} */
function verdictCell() {
  const mark = stateMark("unknown");
  return { element: h("td", {}, mark), update: (row) => updateStateMark(mark, row.verdict) };
}

/** @returns {Cell} */
function decidedByCell() {
  const why = h("span", { class: "few" });
  const element = h("td", { class: "by muted" }, why);
  /** @param {BoundsRow} row */
  const update = (row) => {
    setText(why, row.decided_by ?? row.reason ?? "–");
    setAttribute(element, "title", [row.reason, row.note].filter(Boolean).join("; "));
  };
  return { element, update };
}

/** @param {(row: BoundsRow) => string} shown @param {string | null} [style] @returns {Cell} */
function numberCell(shown, style = "right") {
  const element = h("td", { class: style });
  return { element, update: (row) => setText(element, shown(row)) };
}

/** The class of a sample, and what the model takes it for where that is another. @param {BoundsRow} row */
function sample({ label, prediction }) {
  if (!isNumber(label)) return "";
  return isNumber(prediction) && prediction !== label ? `class ${label}, predicted as ${prediction}` : `class ${label}`;
}

/** What is to be certified, in a few words; models are counted as rows name them. @param {Record<string, any>} property @param {BoundsRow[]} rows */
function question({ robustness, vnnlib, instances }, rows) {
  const models = new Set(rows.map((row) => pair(row.name)[0])).size;
  if (instances) return ["VNN-LIB instances", models > 0 && many(models, "model")].filter(Boolean).join(" · ");
  if (robustness) return ball(robustness);
  if (Array.isArray(vnnlib)) return many(vnnlib.length, "VNN-LIB file");
  return vnnlib ? "VNN-LIB" : "input box";
}

/** The set around each sample, in words. @param {Record<string, any>} robustness */
function ball({ norm = "inf", eps, entries, clip }) {
  const set = norm === 0 ? `${many(entries, "entry", "entries")} changed by ${eps}` : `L${norm === "inf" ? "∞" : norm} ball of radius ${eps}`;
  return Array.isArray(clip) ? `${set} within ${clip.join(" to ")}` : clip ? `${set} within the data's range` : set;
}

/** @param {Record<string, any>} spec */
const method = (spec) => [spec.rigorous && "rigorous", spec.method, spec.intermediate === "fixed" && "(fixed intermediate bounds)"]
  .filter(Boolean).join(" ");
