/** The pipeline's schedule as it was planned at submit: who computes what and when, and what it will cost. */

import { settled } from "../lib/axes.js";
import { number, percent } from "../lib/format.js";
import { reach } from "../lib/gantt.js";
import { plannedRows, tones } from "../lib/plan.js";
import { tickLabel } from "../lib/scales.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, setText } from "../ui/dom.js";
import { Gantt, key } from "../ui/gantt.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/plan.js").Plan} Plan */

/** Bubbles that differ by no more are the same. */
const NEAR = 0.02;

/** Whether the service schedules its pipeline: a program schedules its steps itself. @param {import("../lib/types.js").Job} job */
const hasPlan = (job) => !job.spec.program && (job.spec.parallel?.pp ?? 1) > 1;

export class PipelinePlan extends Section {
  constructor() {
    super("Pipeline schedule", "plan");
    this.figures = h("dl", { class: "figures" });
    this.legend = h("div", {});
    this.gantt = new Gantt("Planned schedule", tickLabel);
    this.words = h("p", { class: "muted" });
    this.body.append(this.figures, this.words, this.legend, this.gantt.element);
    this.element.hidden = true;
    this.fetched = false;
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    this.element.hidden = !hasPlan(job);
  }

  /** A plan never changes. @param {import("../lib/types.js").Job} job */
  async fetch(job) {
    if (this.fetched || !hasPlan(job)) return;
    const plan = /** @type {Plan} */ (await call(jobPath(job.id, "/schedule")));
    this.fetched = true;
    this.remark(`${plan.schedule}, as planned · in units of one forward`);
    const { series } = await call(jobPath(job.id, "/metrics?names=bubble_fraction"));
    const measured = settled(series.bubble_fraction?.value ?? []);
    fill(this.figures, ...figures(plan, measured).map(([name, value, title]) => h("div", { title }, h("dt", {}, name), h("dd", {}, value))));
    setText(this.words, Number.isFinite(measured) ? bubbleWords(measured - plan.bubble) : "");
    fill(this.legend, key(tones(plan)));
    const rows = plannedRows(plan);
    this.gantt.set(rows, reach(rows));
  }
}

/** Why what was measured is another number than the prediction. @param {number} more of the time */
const bubbleWords = (more) => `The prediction counts the schedule alone: each forward takes as long as any other, and nothing else takes time. ` +
  (more > NEAR ? "The measured bubble is larger by what ranks wait for besides: messages between them, stages of unequal length, and, on a CPU, cores that ranks share."
    : more < -NEAR ? "The measured bubble is smaller, since a backward takes longer here than the prediction has it against a forward."
      : "The measured bubble comes close to it.");

/** @param {Plan} plan @param {number} measured NaN where nothing was @returns {[string, string, string][]} */
const figures = (plan, measured) => [
  ["predicted bubble", percent(plan.bubble, 1), "share of the time in which ranks wait by the schedule alone"],
  ...(Number.isFinite(measured) ? [/** @type {[string, string, string]} */ (["measured bubble", percent(measured, 1), "share of the time in which ranks computed nothing: the middle of the later steps"])] : []),
  ["stages", `${number(plan.stages)} on ${number(plan.ranks)} ranks`, "pieces of the model"],
  ["micro-batches", number(plan.micro_batches), "per step and data-parallel rank"],
  ["activations kept", byRank(plan, (row) => row.peak_activations), "most at once, in micro-batches, by rank"],
  ["receive buffers", byRank(plan, (row) => row.peak_buffers), "most at once, by rank"],
];

/** A number for all, or one for each rank; of many ranks the extremes. @param {Plan} plan @param {(row: Plan["rows"][number]) => number} of */
function byRank(plan, of) {
  const values = plan.rows.map(of);
  if (new Set(values).size === 1) return number(values[0]);
  return values.length <= 8 ? values.join(" · ") : `${Math.min(...values)}–${Math.max(...values)}`;
}
