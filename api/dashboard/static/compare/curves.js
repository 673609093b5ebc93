/** One metric of many jobs on one axis. */

import { extent } from "../lib/scales.js";
import { MEASURED } from "../lib/plane.js";
import { bySeed, mean, named } from "../lib/seeds.js";
import { ofDevice, ofLabels, panels, smoothed, table } from "../lib/series.js";
import { isTerminal } from "../lib/state.js";
import { callAt } from "../ui/api.js";
import { AXES, axisSwitch, Crosshair } from "../ui/canvas.js";
import { Chart, TOLD_APART } from "../ui/chart.js";
import { fill, h } from "../ui/dom.js";
import { blank } from "../ui/status.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/series.js").Series} Series */

/** More curves than that are drawn from fewer points. */
const MANY = 200;
/** Jobs of one request. */
const TOGETHER = 100;
/** What is asked for with the names of what there is: most often that is what will be drawn. */
const FIRST = "loss";
/** Frames after which nobody waits for curves that are out of sight. */
const FRAMES = 5;
/** Jobs whose speed and memory are asked for beside the metric that is drawn. */
const MEASURED_JOBS = 100;

export class Curves {
  /**
   * @param {(metric: string) => void} chosen told which metric the user wants
   * @param {() => void} redrawn told that other curves are drawn
   * @param {() => void} previewed told that curves are there before their jobs
   */
  constructor(chosen, redrawn, previewed) {
    this.previewed = previewed;
    /** @type {Job[]} */
    this.jobs = [];
    /** Those that are alike but for their seeds, found once. @type {{jobs: Job[], groups: number[][]}} */
    this.grouped = { jobs: [], groups: [] };
    /** @type {string[]} */
    this.names = [];
    this.metric = "";
    /** @type {"step" | "time"} */
    this.by = "step";
    this.weight = 0;
    /** The metrics of each job. @type {Map<string, string[]>} */
    this.known = new Map();
    /** Series by job and metric. @type {Map<string, Series>} */
    this.series = new Map();
    this.turn = 0;
    /** Whether the curves are there and the jobs are not. */
    this.isPreview = false;
    /** What was asked for before the jobs were known. @type {Promise<void> | undefined} */
    this.coming = undefined;
    /** When the first of these answers was given, by the service's clock, in milliseconds. */
    this.answeredAt = Number.POSITIVE_INFINITY;
    /** @type {Chart | null} */
    this.chart = null;
    this.select = h("select", { "aria-label": "Metric" });
    this.select.addEventListener("change", () => chosen(this.select.value));
    this.smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "Smoothing" });
    this.smoothing.addEventListener("input", () => {
      this.weight = Number(this.smoothing.value);
      this.draw();
    });
    this.means = h("input", { type: "checkbox" });
    this.means.addEventListener("change", () => {
      this.draw();
      redrawn();
    });
    this.seeds = h("label", {}, this.means, "Mean of seeds");
    this.place = h("div", { class: "curves" });
    this.note = h("span", { class: "note" });
    const axes = axisSwitch(this.by, (by) => {
      this.by = by;
      this.chart = null;
      this.draw();
    });
    this.element = h("section", { class: "panel", id: "curves", "aria-label": "Curves" },
      h("header", {}, h("h2", {}, "Curves"), this.note,
        h("span", { class: "aside" }, this.seeds, h("label", { class: "smoothing" }, "Smoothing", this.smoothing), axes, this.select)),
      this.place);
  }

  /**
   * Asks for the curves of jobs while the jobs themselves are on their way, the first time.
   * @param {string[]} ids @param {string} wanted
   */
  expect(ids, wanted) {
    this.coming ??= this.fetch(ids, ids.length, wanted || FIRST).then(() => this.preview(ids, wanted || FIRST)).catch(() => this.known.clear());
  }

  /** Shows many curves that came before their jobs; a legend would change with their names. @param {string[]} ids @param {string} metric */
  preview(ids, metric) {
    if (this.turn > 0 || ids.length <= TOLD_APART || !ids.some((id) => this.series.has(`${id} ${metric}`))) return;
    this.isPreview = true;
    this.jobs = ids.map((id) => /** @type {Job} */ ({ id }));
    this.names = ids;
    this.metric = metric;
    this.relist([metric], metric);
    this.draw();
    this.previewed();
  }

  /** Until the curves were seen: they are painted a frame or two after they are there, while they can be seen. */
  async painted() {
    for (let frame = 0; frame < FRAMES; frame += 1) {
      await new Promise((resolve) => requestAnimationFrame(() => window.setTimeout(resolve)));
      if (!this.chart || this.chart.surface.painted > 0) return;
    }
  }

  /** Whether a job may have ended after its curve was asked for. @param {Job} job */
  hasJustEnded(job) {
    return Date.parse(job.ended_at ?? "") > this.answeredAt;
  }

  /**
   * Shows a metric of these jobs, the first that there is where the wanted one is not. What ended jobs reported is asked
   * for once.
   * @param {Job[]} jobs @param {string[]} names of the jobs @param {string} wanted
   */
  async show(jobs, names, wanted) {
    const mine = ++this.turn;
    await this.coming;
    this.isPreview = false;
    this.jobs = jobs;
    this.names = names;
    const asked = jobs.filter((job) => !this.known.has(job.id) || !isTerminal(job.state) || this.hasJustEnded(job));
    this.answeredAt = Number.POSITIVE_INFINITY;
    await this.ask(asked, wanted || FIRST);
    const found = panels([...new Set(jobs.flatMap((job) => this.known.get(job.id) ?? []))].filter((name) => !ofDevice(name) && !ofLabels(name))).flatMap((panel) => panel.names);
    const metric = found.includes(wanted) ? wanted : (found[0] ?? "");
    this.relist(found, metric);
    const lacking = jobs.filter((job) => this.known.get(job.id)?.includes(metric) &&
      (!this.series.has(`${job.id} ${metric}`) || !isTerminal(job.state)));
    await this.ask(lacking, metric);
    if (mine !== this.turn) return;
    if (metric !== this.metric) this.chart = null;
    this.metric = metric;
    this.draw();
  }

  /** @param {Job[]} jobs @param {string} metric */
  ask(jobs, metric) {
    return this.fetch(jobs.map((job) => job.id), this.jobs.length, metric);
  }

  /** @param {string[]} ids @param {number} all how many are compared @param {string} metric */
  async fetch(ids, all, metric) {
    const wanted = metric && all <= MEASURED_JOBS ? [metric, ...MEASURED].join(",") : metric;
    const points = all > MANY ? 100 : all > TOLD_APART ? 400 : 1000;
    const parts = Array.from({ length: Math.ceil(ids.length / TOGETHER) }, (_, part) => ids.slice(part * TOGETHER, (part + 1) * TOGETHER));
    await Promise.all(parts.map(async (part) => {
      const named = part.map(encodeURIComponent).join(",");
      const { body, after } = await callAt(`/v1/jobs:metrics?ids=${named}&names=${encodeURIComponent(wanted)}&max_points=${points}`);
      this.answeredAt = Math.min(this.answeredAt, Number.parseInt(after));
      for (const one of body.items) {
        this.known.set(one.job, one.names);
        for (const [name, series] of table(one)) this.series.set(`${one.job} ${name}`, series);
      }
    }));
  }

  /** @param {string[]} found @param {string} metric */
  relist(found, metric) {
    if (found.join() !== [...this.select.options].map((option) => option.value).join()) {
      fill(this.select, ...found.map((name) => h("option", { value: name }, name)));
    }
    this.select.value = metric;
    this.select.hidden = found.length === 0;
  }

  /** The jobs of each curve, by their places. @returns {number[][]} */
  groups() {
    this.seeds.hidden = true;
    if (this.isPreview) return this.jobs.map((_, index) => [index]);
    if (this.grouped.jobs !== this.jobs) this.grouped = { jobs: this.jobs, groups: bySeed(this.jobs) };
    const { groups } = this.grouped;
    this.seeds.hidden = groups.length === this.jobs.length;
    return this.means.checked && !this.seeds.hidden ? groups : this.jobs.map((_, index) => [index]);
  }

  /** The curves, each with its jobs: one of a job, or the mean of those that differ in their seed. */
  curves() {
    return this.groups().flatMap((group) => {
      const found = group.flatMap((index) => this.series.get(`${this.jobs[index]?.id} ${this.metric}`) ?? []);
      if (found.length === 0) return [];
      const jobs = group.map((index) => this.names[index] ?? "");
      const lines = found.map((series) => this.curve(series));
      const [first] = lines;
      if (group.length === 1 && first) return [{ ...first, name: jobs[0] ?? "", jobs }];
      return [{ ...mean(lines), name: named(group.flatMap((index) => this.jobs[index] ?? [])), jobs }];
    });
  }

  /** Which curve is a job's, by the job's name. @returns {Map<string, number>} */
  drawn() {
    return new Map(this.curves().flatMap(({ jobs }, index) => jobs.map((name) => /** @type {const} */ ([name, index]))));
  }

  draw() {
    const curves = this.curves();
    this.element.hidden = this.jobs.length > 0 && curves.length === 0 && !this.jobs.some((job) => job.kind === "train");
    if (curves.length === 0) return void fill(this.place, blank("No curves", "These jobs reported no metrics so far."));
    if (!this.chart) {
      const [panel] = panels([this.metric]);
      if (!panel) return;
      this.chart = new Chart({ ...panel, title: this.metric }, new Crosshair(), AXES[this.by]);
      fill(this.place, this.chart.element);
    }
    this.note.textContent = curves.length > TOLD_APART ? `${curves.length} curves; point at a row of the table to find its own` : "";
    this.chart.set(curves, extent(curves.map(({ x }) => [x[0] ?? Number.NaN, x.at(-1) ?? Number.NaN])));
  }

  /** @param {Series} series */
  curve({ step, time, value }) {
    const start = time[0] ?? 0;
    const x = this.by === "step" ? step : time.map((moment) => moment - start);
    return { x, y: this.weight ? smoothed(value, this.weight) : value };
  }

  /** @param {string | null} name of the job whose curve is to stand out */
  raise(name) {
    this.chart?.raise(this.chart.curves.find(({ jobs }) => name !== null && jobs?.includes(name))?.name ?? null);
  }
}
