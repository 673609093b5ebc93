/** The ladder of a compile check: a row per rung and phase, its findings, and the gate that follows. */

import { magnitude, number } from "../lib/format.js";
import { comparisons, entries, largestError, place, tally, tone } from "../lib/report.js";
import { isTerminal } from "../lib/state.js";
import { call, items, jobPath } from "../ui/api.js";
import { fill, h, setAttribute, setText } from "../ui/dom.js";
import { stateMark } from "../ui/parts.js";
import { blank } from "../ui/status.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/report.js").Rung} Rung */
/** @typedef {import("../ui/dom.js").Child} Child */

const REPORT = "report.json";
const COLUMNS = ["Rung", "Phase", "Verdict", "Largest error", "Breaks", "Recompiles", "Compile cold", "warm", "Step", "vs eager"];
const PHASES = ["train", "inference"];

export class Compile extends Section {
  constructor() {
    super("Compile check", "compile");
    /** @type {Job | null} */
    this.job = null;
  }

  /** @param {Job} job */
  async fetch(job) {
    const artifacts = items(await call(jobPath(job.id, "/artifacts")));
    if (artifacts.some((artifact) => artifact.name === REPORT)) this.update(await call(jobPath(job.id, "/report")));
    else fill(this.body, blank(isTerminal(job.state) ? "This job left no report" : "No report yet",
      isTerminal(job.state) ? "" : "The ladder appears when its last rung is done."));
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type === "artifact" && event.name === REPORT && this.job) void this.load(this.job);
  }

  /** @param {Job} job */
  show(job) {
    const ended = this.job !== null && !isTerminal(this.job.state) && isTerminal(job.state);
    this.job = job;
    this.remark((job.spec.modes ?? []).join(" → "));
    if (ended) void this.load(job);
  }

  /** @param {Record<string, any>} report */
  update(report) {
    const rungs = /** @type {Rung[]} */ (report.rungs ?? []);
    const head = h("tr", {}, ...COLUMNS.map((name, index) => h("th", { scope: "col", class: index > 2 ? "right" : null }, name)));
    fill(this.body, gate(report.gate ?? {}), sentences(report.summary ?? []),
      h("div", { class: "scroll" }, h("table", { class: "table ladder" }, h("thead", {}, head), h("tbody", {}, ...rungs.flatMap(lines)))));
  }
}

/** @param {string[]} all */
const sentences = (all) => all.length > 0 && h("ul", { class: "sentences" }, ...all.map((one) => h("li", {}, one)));

/** What training jobs may compile because of this report. @param {Record<string, any>} found */
function gate(found) {
  const checked = PHASES.filter((phase) => !found.worth || phase in found.worth);
  const valid = entries(found.fingerprint);
  return h("div", { class: "gate" },
    h("div", { class: "permissions" }, ...checked.map((phase) => permission(phase, found[phase] ?? null))),
    valid.length > 0 && h("details", {}, h("summary", {}, "Holds for this configuration only"), pairs(valid)));
}

/** @param {string} phase @param {string | null} rung */
const permission = (phase, rung) =>
  h("div", { class: "permission", "data-phase": phase }, h("span", { class: "muted" }, phase),
    h("strong", {}, rung ?? "no rung"), stateMark(rung === null ? "denied" : "allowed"));

/** A row, and under it, on request, what was found. @param {Rung} rung */
function lines(rung) {
  const detail = h("tr", { class: "detail" }, h("td", { colspan: COLUMNS.length }, ...findings(rung)));
  detail.hidden = true;
  const open = h("button", { class: "link", type: "button", "aria-expanded": "false" }, String(rung.rung));
  open.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    setAttribute(open, "aria-expanded", String(!detail.hidden));
  });
  const mark = stateMark(tone(rung));
  setText(mark, String(rung.verdict).replaceAll("_", " "));
  const numbers = [magnitude(largestError(rung)), number(tally(rung.graph_breaks)), number(tally(rung.recompiles)),
    seconds(rung.compile_s?.cold), seconds(rung.compile_s?.warm), milliseconds(rung.step_ms), times(rung.ratio)];
  const row = h("tr", { "data-rung": `${rung.rung} ${rung.phase}` }, h("td", {}, open), h("td", { class: "muted" }, String(rung.phase)),
    h("td", {}, mark), ...numbers.map((value) => h("td", { class: "right" }, value)));
  return [row, detail];
}

/** @param {unknown} value */
const seconds = (value) => (typeof value === "number" ? `${value.toFixed(value < 100 ? 2 : 0)}\u202fs` : "–");
/** @param {unknown} value */
const milliseconds = (value) => (typeof value === "number" ? `${number(value, 3)}\u202fms` : "–");
/** @param {unknown} value */
const times = (value) => (typeof value === "number" ? `${value.toFixed(2)}×` : "–");

/** @param {Rung} rung @returns {Child[]} */
function findings(rung) {
  const all = [
    list("Why", (rung.findings ?? []).map((/** @type {any} */ one) => [one.message])),
    list("Graph breaks", (rung.graph_breaks ?? []).map((/** @type {any} */ one) => [one.reason, place(one), one.count])),
    list("Recompiles", (rung.recompiles ?? []).map((/** @type {any} */ one) => [one.guard, place(one)])),
    list("Limits that were hit", (rung.limit_hits ?? []).map((/** @type {unknown} */ one) => [String(one)])),
    list("Notes", [...(rung.notes ?? []), rung.parity?.note].filter(Boolean).map((one) => [String(one)])),
    parity(rung),
    group("Graphs", { forward: rung.graphs, backward: rung.backward_graphs, operations: rung.operations, "whole program": rung.fullgraph }),
    group("Parameters", rung.parameters),
    group("Peak memory, GiB", { compiled: rung.memory_gib, eager: rung.eager_memory_gib }),
    list("Calls", (rung.invocations ?? []).map((/** @type {any} */ one) => [`shape ${one.shape}`, "", one.calls])),
  ];
  return all.some((part) => part.length) ? all.flat() : [h("p", { class: "muted" }, "This rung was not tried.")];
}

/** @param {string} name @param {[reason: string, where?: string, count?: number][]} all @returns {Child[]} */
const list = (name, all) =>
  all.length === 0 ? [] : [h("h3", {}, name), h("ul", { class: "causes" }, ...all.map(([reason, where, count]) =>
    h("li", {}, h("span", {}, reason), where && h("span", { class: "code muted" }, where),
      count !== undefined && count > 1 && h("span", { class: "muted" }, `${number(count)}×`))))];

/** @param {string} name @param {unknown} part @returns {Child[]} */
const group = (name, part) => (entries(part).length ? [h("h3", {}, name), pairs(entries(part))] : []);

/** The comparisons with eager that came out worst. @param {Rung} rung @returns {Child[]} */
function parity(rung) {
  const all = comparisons(rung);
  if (all.length === 0) return [];
  const head = ["Compared", "Tensor", "Iteration", "Largest error", "× eager's own", "Of what is allowed"];
  const rows = all.map((one) => h("tr", { "data-failed": !(Number(one.excess) <= 1) }, h("td", {}, one.kind), h("td", { class: "code" }, one.name),
    ...[number(one.iteration), magnitude(one.max_abs), one.ratio === null ? "–" : number(one.ratio, 3), number(one.excess, 3)].map((value) =>
      h("td", { class: "right" }, value))));
  return [h("h3", {}, `Parity, judged by ${rung.parity.judged_by}, ${number(rung.parity.compared)} tensors`),
    h("div", { class: "scroll" }, h("table", { class: "table" },
      h("thead", {}, h("tr", {}, ...head.map((name, index) => h("th", { scope: "col", class: index > 1 ? "right" : null }, name)))),
      h("tbody", {}, ...rows)))];
}

/** @param {[string, string][]} all */
const pairs = (all) => h("dl", { class: "pairs" }, ...all.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
