/** One rung of a compile check: its row in the ladder, and what was found. */

import { duration, magnitude, number } from "../lib/format.js";
import { comparisons, entries, largestError, place, tally, title, tone } from "../lib/report.js";
import { h, setAttribute, setText } from "../ui/dom.js";
import { stateMark, withHeadings } from "../ui/parts.js";

/** @typedef {import("../lib/report.js").Rung} Rung */
/** @typedef {import("../ui/dom.js").Child} Child */

export const COLUMNS = ["Rung", "Phase", "Verdict", "Largest error", "Breaks", "Recompiles", "Compile (warm)", "Step", "Eager step", "vs eager"];

/** Rungs that have ended, and those to come, while there is no report. @param {ReturnType<typeof import("../lib/report.js").provisional>} rows */
export const provisionalTable = (rows) => h("div", { class: "scroll" }, h("table", { class: "table ladder" },
  h("thead", {}, h("tr", {}, ...["Rung", "Phase", "Verdict", "Took"].map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, ...rows.map((row) => h("tr", { "data-rung": `${row.rung} ${row.phase}` }, h("td", {}, ...breakable(title(row.rung))),
    h("td", { class: "muted" }, row.phase), h("td", {}, ended(row)), h("td", {}, row.seconds === null ? "–" : duration(row.seconds)))))));

/** @param {{verdict: string | null, isTried: boolean}} row @returns {Child} */
function ended({ verdict, isTried }) {
  if (verdict === null) return isTried ? stateMark("running") : h("span", { class: "muted" }, "–");
  return verdictMark({ verdict });
}

/** @param {Rung} rung */
function verdictMark(rung) {
  const mark = stateMark(tone(rung));
  setText(mark, String(rung.verdict).replaceAll("_", " "));
  return mark;
}

/** A row, and under it, on request, what was found. @param {Rung} rung */
export function lines(rung) {
  const detail = h("tr", { class: "detail" }, h("td", { colspan: COLUMNS.length }, ...findings(rung)));
  detail.hidden = true;
  const open = h("button", { class: "link", type: "button", "aria-expanded": "false" }, ...breakable(title(rung.rung)));
  open.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    setAttribute(open, "aria-expanded", String(!detail.hidden));
  });
  const numbers = [magnitude(largestError(rung)), number(tally(rung.graph_breaks)), number(tally(rung.recompiles)),
    compiling(rung.compile_s), milliseconds(rung.step_ms), milliseconds(rung.eager_step_ms), pace(rung)];
  const row = h("tr", { "data-rung": `${rung.rung} ${rung.phase}` }, h("td", {}, open), h("td", { class: "muted" }, String(rung.phase)),
    h("td", {}, verdictMark(rung)), ...numbers.map((value) => h("td", { class: "right" }, value)));
  return [row, detail];
}

/** Long names may go on in a next line, behind an underscore. @param {string} name @returns {Child[]} */
const breakable = (name) => name.split("_").flatMap((part, index) => (index ? ["_", h("wbr"), part] : [part]));
/** @param {unknown} value */
const seconds = (value) => (typeof value === "number" ? `${value.toFixed(value < 100 ? 2 : 0)}\u202fs` : "–");
/** @param {{cold: number, warm: number | null} | null | undefined} times */
const compiling = (times) => (times ? `${seconds(times.cold)} (${seconds(times.warm)})` : "–");
/** @param {unknown} value */
const milliseconds = (value) => (typeof value === "number" ? `${number(value, 3)}\u202fms` : "–");
/** @param {unknown} value */
const percent = (value) => (typeof value === "number" ? `${number(100 * value, 2)} %` : "–");
/** @param {unknown} value */
export const times = (value) => (typeof value === "number" ? `${value.toFixed(2)}×` : "–");

/** Against eager steps that were timed in turns with it. @param {Rung} rung @returns {Child} */
const pace = ({ ratio, noisy }) => (noisy ? h("span", { title: "The timings of this comparison vary too much" }, times(ratio), h("span", { class: "noisy" }, "noisy")) : times(ratio));

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
    list("Hooks of FSDP2 inside of graphs", (rung.hooks ?? []).map((/** @type {any} */ one) => [one.reason, "", one.count])),
    group("Compiled autograd", rung.autograd_captures > 0 ? { "backward passes captured": rung.autograd_captures } : null),
    ...cudaGraphs(rung.cudagraph),
    list("Step marks", (rung.marks ?? []).map((/** @type {any} */ one) => [one.while_pending ? `while a backward is pending: ${one.pending.join(", ")}` : "between steps", one.site, one.marks])),
    list("Calls during a backward", (rung.reentries ?? []).map((/** @type {any} */ one) => [`${one.module}, iteration ${one.iteration}`, one.site])),
    group("Launching a step", launching(rung)),
    group("Peak memory, GiB", { compiled: rung.memory_gib, eager: rung.eager_memory_gib, "compiled, reserved": rung.reserved_gib, "eager, reserved": rung.eager_reserved_gib }),
  ];
  return all.some((part) => part.length) ? all.flat() : [h("p", { class: "muted" }, "This rung was not tried.")];
}

/** @param {Record<string, any> | null | undefined} found @returns {Child[][]} */
function cudaGraphs(found) {
  if (!found) return [];
  const reasons = (/** @type {any[]} */ all) => all.map((one) => /** @type {[string, string, number]} */ ([one.reason, "", one.count]));
  return [group("CUDA graphs", { captured: found.captures, "launches per step": found.launches_per_step }),
    list("Captured for", (found.by_shape ?? []).map((/** @type {any} */ one) => [one.shapes, "", one.captures])),
    list("Not captured", reasons(found.skips ?? [])), list("Captured again", reasons(found.rerecords ?? [])),
    list("Errors", (found.errors ?? []).map((/** @type {unknown} */ one) => [String(one)]))];
}

/** What the host pays for a step, compiled and eager. @param {Rung} rung */
function launching({ profile, eager_profile: eager }) {
  if (!profile) return null;
  const pair = (/** @type {string} */ name) => [profile[name], eager?.[name]].map((value) => (typeof value === "number" ? number(value, 3) : null));
  const both = (/** @type {string} */ name) => (pair(name)[0] === null ? null : pair(name).map((value) => value ?? "–").join(", eager "));
  return { "time to queue it, ms": both("enqueue_ms"), "kernel launches": both("launches"), "graph launches": both("graph_launches"),
    "device busy, ms": both("busy_ms"), "operators in compiled code": typeof profile.compiled_share === "number" ? `${(100 * profile.compiled_share).toFixed(0)} %` : null };
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
  const head = ["Compared", "Tensor", "Iteration", "Largest error", "× eager's own", "Of what is allowed", "Eager's noise"];
  const rows = all.map((one) => h("tr", { "data-failed": !(Number(one.excess) <= 1) || one.is_noisy === true }, h("td", {}, one.kind), h("td", { class: "code" }, one.name),
    ...[number(one.iteration), magnitude(one.max_abs), one.ratio === null ? "–" : number(one.ratio, 3), number(one.excess, 3), percent(one.noise)].map((value) =>
      h("td", { class: "right" }, value))));
  const table = h("table", { class: "table cards" },
    h("thead", {}, h("tr", {}, ...head.map((name, index) => h("th", { scope: "col", class: index > 1 ? "right" : null }, name)))),
    h("tbody", {}, ...rows));
  withHeadings(table);
  return [h("h3", {}, `Parity, judged by ${rung.parity.judged_by}, ${number(rung.parity.compared)} tensors`), h("div", { class: "scroll" }, table)];
}

/**
 * A table under a heading; nothing where there are no rows.
 * @param {string} name @param {string[]} head @param {Child[][]} rows
 * @returns {Child[]}
 */
export function table(name, head, rows) {
  if (rows.length === 0) return [];
  const made = h("table", { class: "table cards" },
    h("thead", {}, h("tr", {}, ...head.map((one) => h("th", { scope: "col" }, one)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, cell))))));
  withHeadings(made);
  return [h("h3", { class: "under" }, name), h("div", { class: "scroll" }, made)];
}

/** @param {[string, string][]} all */
const pairs = (all) => h("dl", { class: "pairs" }, ...all.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
