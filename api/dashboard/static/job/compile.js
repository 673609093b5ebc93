/** The ladder of a compile check: a row per rung and phase, its findings, and the gate that follows. */

import { number } from "../lib/format.js";
import { climbed, entries, fastest, furthest, held, invocations, more, payoff, provisional, title, tone } from "../lib/report.js";
import { isTerminal } from "../lib/state.js";
import { artifactPath, call, items, jobPath } from "../ui/api.js";
import { copy } from "../ui/clipboard.js";
import { fill, h } from "../ui/dom.js";
import { downloadLink, stateMark, withHeadings } from "../ui/parts.js";
import { blank } from "../ui/status.js";
import { COLUMNS, lines, provisionalTable, table, times } from "./rung.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/report.js").Rung} Rung */
/** @typedef {import("../ui/dom.js").Child} Child */

const REPORT = "report.json";
const PHASES = ["train", "inference"];

export class Compile extends Section {
  constructor() {
    super("Compile check", "compile");
    /** @type {Job | null} */
    this.job = null;
    /** @type {import("../lib/report.js").Climb} */
    this.climb = new Map();
    this.isReported = false;
    this.drawn = "";
  }

  /** @param {Job} job */
  async fetch(job) {
    const artifacts = items(await call(jobPath(job.id, "/artifacts")));
    this.isReported = artifacts.some((artifact) => artifact.name === REPORT);
    if (this.isReported) this.update(await call(jobPath(job.id, "/report")));
    else {
      for (const span of (await call(jobPath(job.id, "/timeline"))).apart) climbed(this.climb, span);
      this.drawn = "";
      this.follow(job);
    }
  }

  /** What is known before there is a report. @param {Job} job */
  follow(job) {
    const isOver = isTerminal(job.state);
    const rows = provisional(this.climb, job.spec, job.state === "running");
    const signature = JSON.stringify([isOver, rows]);
    if (this.isReported || signature === this.drawn) return;
    this.drawn = signature;
    const isClimbed = rows.every((row) => row.verdict !== null);
    const next = isClimbed ? "All rungs have ended; failures are being diagnosed and the detectors tested." : "It appears when the last rung has ended.";
    fill(this.body, blank(isOver ? "This job produced no report" : "No report yet", isOver ? "" : next),
      (this.climb.size > 0 || job.state === "running") && provisionalTable(rows));
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (!this.job) return;
    if (event.type === "artifact" && event.name === REPORT) void this.load(this.job);
    if (event.type === "span") {
      climbed(this.climb, /** @type {any} */ (event));
      this.follow(this.job);
    }
  }

  /** @param {Job} job */
  show(job) {
    const ended = this.job !== null && !isTerminal(this.job.state) && isTerminal(job.state);
    this.job = job;
    this.remark((job.spec.modes ?? []).map(title).join(" → "));
    if (ended) void this.load(job);
    else if (this.drawn) this.follow(job);
  }

  /** @param {Record<string, any>} report */
  update(report) {
    const rungs = /** @type {Rung[]} */ (report.rungs ?? []);
    const head = h("tr", {}, ...COLUMNS.map((name, index) => h("th", { scope: "col", class: index > 2 ? "right" : null }, name)));
    const ladder = h("table", { class: "table cards ladder" }, h("thead", {}, head), h("tbody", {}, ...rungs.flatMap(lines)));
    withHeadings(ladder);
    fill(this.body, gate(report.gate ?? {}, rungs, this.job?.id ?? ""), sentences(more(report.summary ?? [])), this.causes(report.diagnoses ?? []),
      h("div", { class: "scroll" }, ladder),
      ...lifetimes(rungs), ...calls(rungs), proofs(report.selftest ?? []));
  }

  /** What was found out about the rungs that failed. @param {Record<string, any>[]} diagnoses */
  causes(diagnoses) {
    const id = this.job?.id ?? "";
    return diagnoses.length > 0 && h("div", { class: "diagnoses" }, ...diagnoses.map((one) => h("div", { class: "diagnosis" },
      h("strong", {}, `${title(one.rung)}, ${one.phase}`), " fails in ", h("span", { class: "code" }, one.module ?? "several modules together"),
      h("p", {}, one.fault),
      h("p", { class: "muted" }, ...reproduction(one.reproduction ?? {}, id)))));
  }
}

/** @param {Record<string, any>} found @param {string} job @returns {Child[]} */
function reproduction(found, job) {
  if (!found.script) return [`No script reproduces it alone: ${found.said}`];
  const link = downloadLink({}, artifactPath(job, found.script), found.script);
  const size = `${number(found.operators)} ${found.operators === 1 ? "operator" : "operators"}`;
  const sure = found.confirmed ? "confirmed in a process of its own" : found.confirmed === false ? "not confirmed" : "not measured";
  return [link, ` (${size}, ${sure}): ${found.said}`,
    found.bisection && ` · ${found.bisection}`];
}

/** @param {string[]} all */
const sentences = (all) => all.length > 0 && h("ul", { class: "sentences" }, ...all.map((one) => h("li", {}, one)));

/** What training jobs may compile because of this report. @param {Record<string, any>} found @param {Rung[]} rungs @param {string} job */
function gate(found, rungs, job) {
  const checked = PHASES.filter((phase) => !found.worth || phase in found.worth);
  const valid = entries(found.fingerprint);
  return h("div", { class: "gate" },
    h("div", { class: "permissions" }, ...checked.map((phase) => permission(phase, found, rungs.filter((rung) => rung.phase === phase)))),
    snippet(checked.filter((phase) => (found[phase] ?? null) !== null), job),
    valid.length > 0 && h("details", {}, h("summary", {}, "Holds for this configuration only"), pairs(valid)));
}

/** What a training's spec says to be compiled by this gate. @param {readonly string[]} phases @param {string} job */
function snippet(phases, job) {
  if (phases.length === 0) return null;
  const text = `compile: {${phases.map((phase) => `${phase}: true, `).join("")}gate: ${job}}`;
  const shown = h("code", {}, text);
  const button = h("button", { class: "tiny", type: "button" }, "Copy");
  button.addEventListener("click", () => void copy(text, shown, "The line"));
  return h("p", { class: "snippet" }, h("span", { class: "muted" }, "In a training's spec"), shown, button);
}

/** @param {string} phase @param {Record<string, any>} found @param {Rung[]} rungs */
function permission(phase, found, rungs) {
  const allowed = found[phase] ?? null;
  return h("div", { class: "permission", "data-phase": phase }, h("span", { class: "muted" }, phase),
    h("strong", {}, allowed === null ? "no rung" : title(allowed)), stateMark(allowed === null ? "denied" : "allowed"),
    h("ol", { class: "rungs" }, ...rungs.map((rung) => h("li", { "data-tone": tone(rung), title: String(rung.verdict).replaceAll("_", " ") }, title(rung.rung)))),
    h("span", { class: "worth" }, worth(found.worth?.[phase] ?? {}, fastest(rungs, allowed))));
}

/** In a few words what the allowed rung brings. @param {Record<string, any>} found @param {Rung | null} rung */
function worth(found, rung) {
  if (typeof found.ratio !== "number") return "not timed";
  const memory = typeof rung?.memory_gib === "number" ? `${number(rung.memory_gib, 3)} GiB, eager ${number(rung.eager_memory_gib, 3)}` : "";
  return [`${times(found.ratio)} the time of an eager step`, payoff(found), memory].filter(Boolean).join(" · ");
}

/** @param {[string, string][]} all */
const pairs = (all) => h("dl", { class: "pairs" }, ...all.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

/** Results that something still holds when the next replay writes over them. @param {Rung[]} rungs @returns {Child[]} */
function lifetimes(rungs) {
  const rows = held(rungs).map(({ rung, one }) => [`${rung.phase}, ${title(rung.rung)}`, one.module, `[${one.shape.join(", ")}]`, one.holders.join(", ") || "unknown", one.site]);
  return table("Results that outlive their step", ["Rung", "Module", "Shape", "Held by", "Made at"], rows);
}

/** Whether the harness finds the faults that are injected into it. @param {Record<string, any>[]} all */
function proofs(all) {
  const rows = all.map((one) => h("li", {}, `${one.holds ? "✓" : "✗"} ${one.detector === "none" ? "no detector" : one.detector}: ${one.fault}`));
  const right = all.filter((one) => one.holds).length;
  return all.length > 0 && h("details", { class: "selftest" },
    h("summary", {}, `Self-test: ${right} of ${all.length} injected faults judged correctly`), h("ul", {}, ...rows));
}

/** How the program called its modules, at the furthest rung of each phase. @param {Rung[]} rungs @returns {Child[]} */
function calls(rungs) {
  const rows = PHASES.flatMap((phase) => invocations(furthest(rungs, phase)).map((one) =>
    [phase, one.module, `${one.phase}${one.grad ? ", gradients" : ""}`, one.thread, one.dtype ? `${one.shape} ${one.dtype}` : one.shape, number(one.per_step ?? one.calls, 3)]));
  return table("Calls of compiled modules", ["Phase", "Module", "Mode", "Thread", "Shapes", "Per step"], rows);
}
