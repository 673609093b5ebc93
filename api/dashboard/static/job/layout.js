/** The mesh of a job: its ranks, what each has of the model, and the device on which it runs. */

import { mesh } from "../lib/format.js";
import { meaning, rows } from "../lib/layout.js";
import { call, jobPath } from "../ui/api.js";
import { swatchOf } from "../ui/chart.js";
import { fill, h } from "../ui/dom.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */

/** Rows of a large mesh that are drawn. */
const MOST = 64;

export class Layout extends Section {
  constructor() {
    super("Layout", "layout");
    this.words = h("p", { class: "muted" });
    this.table = h("table", { class: "table mesh" });
    this.body.append(h("div", { class: "scroll" }, this.table), this.words);
    this.element.hidden = true;
    /** Stages of each pipeline rank. @type {number[][]} */
    this.stages = [];
    this.drawn = "";
  }

  /** Which stages a rank of a training's pipeline has depends on the schedule. @param {Job} job */
  async fetch(job) {
    if (job.kind !== "train" || job.spec.program || (degrees(job).pp ?? 1) === 1 || this.stages.length) return;
    const plan = await call(jobPath(job.id, "/schedule"));
    this.stages = plan.rows.map((/** @type {{stages: number[]}} */ row) => row.stages);
    this.show(job);
  }

  /** @param {Job} job */
  show(job) {
    const parallel = degrees(job);
    const ranks = Object.values(parallel).reduce((all, degree) => all * degree, 1);
    const signature = JSON.stringify([parallel, job.placement, this.stages]);
    this.element.hidden = ranks < 2;
    if (ranks < 2 || signature === this.drawn) return;
    this.drawn = signature;
    const blocks = job.spec.model?.layers;
    const all = rows(parallel, job.placement, this.stages, typeof blocks === "number" ? blocks : null);
    this.remark(`${mesh(parallel)}, ${ranks} ranks`);
    fill(this.words, [...meaning(job.kind, parallel), ...(all.length > MOST ? [`${all.length - MOST} more rows are not drawn.`] : [])].join(" "));
    fill(this.table, h("tbody", {}, ...all.slice(0, MOST).map(line)));
  }
}

/** @param {Job} job @returns {Record<string, number>} */
const degrees = (job) => job.parallel ?? job.spec.parallel ?? {};

/** @param {import("../lib/layout.js").Row} row */
const line = ({ stage, words, cells }) => h("tr", {},
  words.length > 0 && h("th", { scope: "row" }, words[0]?.startsWith("stage") && swatchOf(stage), words.join(" · ")),
  ...cells.map(({ rank, device }) => h("td", { "data-rank": rank }, h("strong", {}, `rank ${rank}`), h("span", { class: "muted" }, device))));
