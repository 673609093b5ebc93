/** The same question asked by several methods: what each decided, and in what time. */

import { comparePath } from "../lib/compare.js";
import { VERDICTS } from "../lib/bounds.js";
import { duration, number } from "../lib/format.js";
import { how, sameQuestion } from "../lib/methods.js";
import { isTerminal } from "../lib/state.js";
import { call } from "../ui/api.js";
import { fill, h, setAttribute } from "../ui/dom.js";
import { withHeadings } from "../ui/parts.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */

/** Of the newest verifications so many are looked through. */
const LOOKED = 100;

export class Methods extends Section {
  constructor() {
    super("Methods", "methods");
    this.compare = h("a", { class: "button small" }, "Compare");
    this.table = h("table", { class: "table cards" });
    this.aside.append(this.compare);
    this.body.append(h("div", { class: "scroll" }, this.table));
    this.element.hidden = true;
    this.state = "";
  }

  /** @param {Job} job */
  async fetch(job) {
    this.state = job.state;
    const { items: found } = await call(`/v1/jobs?kind=verify&limit=${LOOKED}&include=spec`);
    const all = sameQuestion(job, found);
    this.element.hidden = all.length < 2;
    this.remark("the same question about the same model");
    setAttribute(this.compare, "href", comparePath(all));
    const heads = ["Method", ...VERDICTS, "Mean width", "Time"];
    fill(this.table, h("thead", {}, h("tr", {}, ...heads.map((name, index) => h("th", { scope: "col", class: index ? "right" : null }, name)))),
      h("tbody", {}, ...all.map((one) => row(one, one.id === job.id))));
    withHeadings(this.table);
  }

  /** @param {Job} job */
  show(job) {
    const hasEnded = this.state !== "" && !isTerminal(/** @type {any} */ (this.state)) && isTerminal(job.state);
    if (hasEnded) void this.load(job);
  }
}

/** @param {Job} job @param {boolean} isThis */
function row(job, isThis) {
  const { verdicts = {}, mean_width: width, seconds } = job.result ?? {};
  const name = isThis ? h("strong", {}, how(job)) : h("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, how(job));
  return h("tr", { "data-job": job.id }, h("th", { scope: "row" }, name), ...VERDICTS.map((verdict) => h("td", { class: "right" }, number(verdicts[verdict]))),
    h("td", { class: "right" }, number(width)), h("td", { class: "right" }, duration(seconds)));
}
