/** The ladder of a compile check: a row per rung and phase, its findings, and the gate that follows. */

import { magnitude, number } from "../lib/format.js";
import { cause, entries, many, middle, ratio, tone, worst } from "../lib/report.js";
import { isTerminal } from "../lib/state.js";
import { Problem, call, jobPath } from "../ui/api.js";
import { fill, h, setAttribute, setText } from "../ui/dom.js";
import { stateMark } from "../ui/parts.js";
import { blank } from "../ui/status.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/report.js").Rung} Rung */

const COLUMNS = ["Rung", "Phase", "Verdict", "Largest error", "Breaks", "Recompiles", "Compile cold", "warm", "Step", "vs eager"];

export class Compile extends Section {
  constructor() {
    super("Compile check", "compile");
    /** @type {string | null} state at the last look */
    this.seen = null;
  }

  /** @param {Job} job */
  async fetch(job) {
    this.seen = job.state;
    try {
      this.update(await call(jobPath(job.id, "/report")));
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 404) throw error;
      fill(this.body, blank(isTerminal(job.state) ? "This job left no report" : "No report yet",
        isTerminal(job.state) ? "" : "The ladder appears when the last rung is done."));
    }
  }

  /** @param {Job} job */
  show(job) {
    const modes = (job.spec.modes ?? []).join(" → ");
    this.remark(modes);
    if (this.seen !== null && this.seen !== job.state && isTerminal(job.state)) void this.load(job);
  }

  /** @param {Record<string, any>} report */
  update(report) {
    const rungs = many(report.rungs);
    const head = h("tr", {}, ...COLUMNS.map((name, index) => h("th", { scope: "col", class: index > 2 ? "right" : null }, name)));
    fill(this.body, gate(report.gate),
      h("div", { class: "scroll" }, h("table", { class: "table ladder" }, h("thead", {}, head), h("tbody", {}, ...rungs.flatMap(lines)))),
      rungs.length === 0 && blank("The report has no rungs"));
  }
}

/** What training jobs may compile because of this report. @param {any} found */
function gate(found) {
  if (!found) return null;
  const { fingerprint, ...phases } = found;
  const marks = Object.entries(phases).filter(([, verdict]) => verdict === null || typeof verdict !== "object" || !Array.isArray(verdict))
    .map(([phase, verdict]) => permission(phase, verdict));
  const print = entries(fingerprint);
  return h("div", { class: "gate" }, h("div", { class: "permissions" }, ...marks),
    print.length > 0 && h("details", {}, h("summary", {}, "valid for this configuration only"), pairs(print)));
}

/** @param {string} phase @param {any} verdict a mode, true, or nothing */
function permission(phase, verdict) {
  const mode = verdict !== null && typeof verdict === "object" ? (verdict.mode ?? verdict.rung ?? verdict.allowed) : verdict;
  const allowed = Boolean(mode) && mode !== "none" && mode !== "eager" && mode !== "denied";
  return h("div", { class: "permission", "data-phase": phase }, h("span", { class: "muted" }, phase),
    h("strong", {}, allowed ? (mode === true ? "compile" : String(mode)) : "eager only"), stateMark(allowed ? "allowed" : "denied"));
}

/** A row, and under it, on request, what was found. @param {Rung} rung */
function lines(rung) {
  const found = findings(rung);
  const detail = h("tr", { class: "detail" }, h("td", { colspan: COLUMNS.length }, ...found));
  detail.hidden = true;
  const open = h("button", { class: "link", type: "button", "aria-expanded": "false" }, String(rung.rung ?? "–"));
  open.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    setAttribute(open, "aria-expanded", String(!detail.hidden));
  });
  const faster = ratio(rung);
  const mark = stateMark(tone(rung));
  setText(mark, String(rung.verdict ?? "skipped").replaceAll("_", " "));
  const numbers = [magnitude(worst(rung)), String(many(rung.graph_breaks).length), String(many(rung.recompiles).length),
    seconds(rung.compile_s?.cold), seconds(rung.compile_s?.warm), milliseconds(rung.step_ms)];
  const row = h("tr", { "data-rung": `${rung.rung} ${rung.phase}` }, h("td", {}, open), h("td", { class: "muted" }, String(rung.phase ?? "")),
    h("td", {}, mark), ...numbers.map((value) => h("td", { class: "right" }, value)), h("td", { class: "right" }, times(faster)));
  return [row, detail];
}

/** @param {unknown} value */
const seconds = (value) => (typeof value === "number" ? `${number(value, 3)}\u202fs` : "–");
/** @param {unknown} value */
const milliseconds = (value) => (middle(value) === null ? "–" : `${number(middle(value), 3)}\u202fms`);
/** @param {number | null} value */
const times = (value) => (value === null ? "–" : `${value.toFixed(2)}×`);

/** @param {Rung} rung */
function findings(rung) {
  const lists = /** @type {[string, unknown][]} */ ([
    ["Why", rung.reasons ?? rung.reason ?? rung.message ?? rung.error], ["Graph breaks", rung.graph_breaks], ["Recompiles", rung.recompiles],
    ["CUDA graph skips", rung.cudagraph?.skips], ["CUDA graph errors", rung.cudagraph?.errors], ["Outputs that outlive the step", rung.lifetimes]]);
  const causes = lists.flatMap(([name, list]) => {
    const all = typeof list === "string" ? [list] : many(list);
    return all.length ? [h("h3", {}, name), h("ul", { class: "causes" }, ...all.map(causeLine))] : [];
  });
  const tables = /** @type {[string, unknown][]} */ ([["Parity", rung.parity], ["Invocations", rung.invocations],
    ["Memory", rung.memory_gib === undefined ? null : { peak_gib: rung.memory_gib }]]);
  const numbers = tables.flatMap(([name, part]) => (entries(part).length ? [h("h3", {}, name), pairs(entries(part))] : []));
  return causes.length + numbers.length ? [...causes, ...numbers] : [h("p", { class: "muted" }, "Nothing was found on this rung.")];
}

/** @param {unknown} entry */
function causeLine(entry) {
  const { reason, place, count } = cause(entry);
  return h("li", {}, h("span", {}, reason), place && h("span", { class: "code muted" }, place), count !== null && h("span", { class: "muted" }, `${count}×`));
}

/** @param {[string, string][]} all */
const pairs = (all) => h("dl", { class: "pairs" }, ...all.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
