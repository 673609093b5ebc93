/** Metric curves, growing as the job reports. */

import { extent } from "../lib/scales.js";
import { best, isEvaluation, ofDevice, ofLabels, panels, smoothed, table, take } from "../lib/series.js";
import { isTerminal } from "../lib/state.js";
import { call, jobPath } from "../ui/api.js";
import { AXES, axisSwitch, Crosshair } from "../ui/canvas.js";
import { Chart } from "../ui/chart.js";
import { fill, h, oncePerFrame } from "../ui/dom.js";
import { blank } from "../ui/status.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/series.js").Series} Series */

const MAX_POINTS = 2000;

export class Metrics extends Section {
  /** @param {boolean} always shown also while it has nothing to show */
  constructor(always) {
    super("Metrics", "metrics");
    this.always = always;
    /** @type {Map<string, Series>} */
    this.series = new Map();
    /** @type {Map<string, Chart>} */
    this.charts = new Map();
    this.crosshair = new Crosshair();
    /** @type {"step" | "time"} */
    this.by = "step";
    this.start = 0;
    this.ended = false;
    this.grid = h("div", { class: "charts" });
    this.empty = h("div", {});
    this.body.append(this.grid, this.empty);
    this.weight = 0;
    this.smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "Smoothing" });
    this.smoothing.addEventListener("input", () => {
      this.weight = Number(this.smoothing.value);
      this.update();
    });
    const axes = axisSwitch(this.by, (by) => {
      this.by = by;
      this.rebuild();
    });
    this.aside.append(h("label", { class: "smoothing" }, "Smoothing", this.smoothing), axes);
    this.draw = oncePerFrame(() => this.update());
  }

  rebuild() {
    this.charts.clear();
    this.grid.replaceChildren();
    this.crosshair = new Crosshair();
    this.update();
  }

  /** @param {Job} job */
  async fetch(job) {
    this.series = table(await call(jobPath(job.id, `/metrics?max_points=${MAX_POINTS}`)));
    this.update();
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type !== "metric") return;
    take(this.series, event);
    this.draw();
  }

  /** @param {Job} job */
  show(job) {
    this.ended = isTerminal(job.state);
    this.draw();
  }

  update() {
    const wanted = panels(this.series.keys());
    this.element.hidden = wanted.length === 0 && !this.always;
    this.aside.hidden = wanted.length === 0;
    fill(this.empty, wanted.length === 0 && blank(
      this.ended ? "This job reported no metrics" : "No metrics yet", this.ended ? "" : "Curves appear with the first step."));
    this.start = Math.min(...[...this.series.values()].map((series) => series.time[0] ?? Number.POSITIVE_INFINITY));
    const curves = wanted.map((panel) => panel.names.map((name) => this.curve(name)));
    const reach = extent(curves.flat().map(({ x }) => [x[0] ?? Number.NaN, x.at(-1) ?? Number.NaN]));
    wanted.forEach((panel, index) => {
      const chart = this.charts.get(panel.key) ?? this.add(panel, index);
      chart.set(curves[index] ?? [], reach);
    });
  }

  /** @param {import("../lib/series.js").Panel} panel @param {number} index */
  add(panel, index) {
    const chart = new Chart(panel, this.crosshair, AXES[this.by]);
    this.charts.set(panel.key, chart);
    this.grid.insertBefore(chart.element, this.grid.children[index] ?? null);
    return chart;
  }

  /** @param {string} name */
  curve(name) {
    const series = this.series.get(name) ?? { step: [], time: [], value: [] };
    const x = this.by === "step" ? series.step : series.time.map((time) => time - this.start);
    const isMarked = isEvaluation(name);
    const device = ofDevice(name);
    return { name: device ? `rank ${device.rank}` : ofLabels(name)?.label ?? name, x, y: this.weight && !isMarked ? smoothed(series.value, this.weight) : series.value, marked: isMarked, best: isMarked ? best(name, series.value) : null };
  }
}
