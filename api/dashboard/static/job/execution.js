/** What the ranks did, step by step, as they measured it. */

import { many } from "../lib/format.js";
import { reach } from "../lib/gantt.js";
import { KEPT, inStep, precise, rows, take, tonesOf } from "../lib/spans.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, oncePerFrame, setAttribute } from "../ui/dom.js";
import { Gantt, key } from "../ui/gantt.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/spans.js").Span} Span */

const NEWEST = "newest";

export class Execution extends Section {
  constructor() {
    super("Timeline", "execution");
    /** @type {import("../lib/spans.js").Steps} */
    this.steps = new Map();
    /** @type {Set<number>} */
    this.known = new Set();
    this.chosen = NEWEST;
    /** @type {Job | null} */
    this.job = null;
    this.drawn = "";
    this.picker = h("select", { "aria-label": "Step" });
    this.previous = h("button", { class: "tiny", type: "button", "aria-label": "Earlier step" }, "‹");
    this.next = h("button", { class: "tiny", type: "button", "aria-label": "Later step" }, "›");
    this.aside.append(h("label", {}, "step", this.picker), this.previous, this.next);
    this.legend = h("div", {});
    this.gantt = new Gantt("What the ranks did in a step", precise);
    this.body.append(this.legend, this.gantt.element);
    this.element.hidden = true;
    this.picker.addEventListener("change", () => this.choose(this.picker.value));
    this.previous.addEventListener("click", () => this.move(-1));
    this.next.addEventListener("click", () => this.move(1));
    this.draw = oncePerFrame(() => this.update());
  }

  /** @param {Job} job */
  show(job) {
    this.job = job;
  }

  /** @param {Job} job */
  async fetch(job) {
    this.job = job;
    const found = await call(jobPath(job.id, "/timeline"));
    this.known = new Set(found.steps);
    this.steps = new Map();
    this.keep(found.spans);
    this.update();
  }

  /** @param {Span[]} spans */
  keep(spans) {
    for (const span of spans) take(this.steps, span);
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type !== "span") return;
    const step = take(this.steps, /** @type {any} */ (event));
    if (step === null) return;
    this.known.add(step);
    this.draw();
  }

  /** Steps that can be shown, in order. */
  all() {
    return [...this.known].sort((a, b) => a - b);
  }

  /** The step that is shown: while the job runs, the last that every rank has finished. */
  current() {
    const all = this.all();
    return this.chosen === NEWEST ? (all.findLast((step) => this.isWhole(step)) ?? all.at(-1)) : Number(this.chosen);
  }

  /** @param {number} step */
  isWhole(step) {
    const spans = [...(this.steps.get(step)?.values() ?? [])];
    const ended = spans.filter((span) => span.name === "optimizer").length;
    return ended > 0 && ended >= new Set(spans.map((span) => span.rank)).size;
  }

  /** @param {string} chosen */
  choose(chosen) {
    this.chosen = chosen;
    this.update();
    const step = this.current();
    if (step !== undefined && !this.steps.has(step)) void this.fetchStep(step);
  }

  /** @param {number} by */
  move(by) {
    const all = this.all();
    const at = all.indexOf(this.current() ?? Number.NaN);
    const step = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    if (step !== undefined) this.choose(String(step));
  }

  /** @param {number} step */
  async fetchStep(step) {
    if (!this.job) return;
    const found = await call(jobPath(this.job.id, `/timeline?step=${step}`)).catch(() => null);
    if (!found) return;
    while (this.steps.size >= KEPT) this.steps.delete(/** @type {number} */ (this.steps.keys().next().value));
    this.keep(found.spans);
    this.update();
  }

  update() {
    const all = this.all();
    this.element.hidden = all.length === 0;
    if (all.length === 0) return;
    this.list(all);
    const step = this.current() ?? 0;
    const spans = this.steps.get(step);
    if (!spans) return;
    const signature = `${step}:${spans.size}`;
    if (signature === this.drawn) return;
    this.drawn = signature;
    const lines = rows([...spans.values()], this.job?.spec.parallel?.pp ?? 1);
    const whole = reach(lines, inStep) ?? reach(lines);
    fill(this.legend, key(tonesOf(lines)));
    this.gantt.set(lines, whole);
    setAttribute(this.gantt.canvas, "data-step", step);
    this.remark(`step ${step}${whole ? ` · ${precise(whole[1] - whole[0])}` : ""} · ${many(all.length, "step")} measured`);
  }

  /** @param {number[]} all */
  list(all) {
    if (this.picker.options.length !== all.length + 1) {
      fill(this.picker, h("option", { value: NEWEST }, NEWEST), ...all.map((step) => h("option", { value: step }, String(step))));
    }
    if (this.picker.value !== this.chosen) this.picker.value = this.chosen;
    const at = all.indexOf(this.current() ?? Number.NaN);
    this.previous.disabled = at <= 0;
    this.next.disabled = at === all.length - 1;
  }
}
