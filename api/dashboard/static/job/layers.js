/** How wide the bounds are inside the network, layer by layer, once a verification job is over. */

import { fixed, many, number } from "../lib/format.js";
import { fill, h } from "../ui/dom.js";
import { rail } from "../ui/rail.js";
import { Section } from "./section.js";

const COLUMNS = ["Layer", "Operator", "Neurons", "Mean width", "Unstable"];

export class Layers extends Section {
  constructor() {
    super("Bounds by layer", "layers");
    this.element.hidden = true;
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    const layers = Array.isArray(job.result?.layers) ? job.result.layers : [];
    this.element.hidden = layers.length === 0;
    this.remark(`${many(layers.length, "nonlinear layer")}, means per instance`);
    const widest = Math.max(0, ...layers.map((/** @type {Layer} */ { mean_width }) => mean_width ?? 0));
    const head = h("tr", {}, ...COLUMNS.map((name, index) => h("th", { scope: "col", class: index === 2 ? "right" : null }, name)));
    fill(this.body, h("div", { class: "scroll" }, h("table", { class: "table" }, h("thead", {}, head), h("tbody", {}, ...layers.map(line(widest))))));
  }
}

/** @typedef {{layer: string, operator: string, neurons: number, mean_width: number | null, mean_unstable: number | null}} Layer */

/** Bars are lengths of the widest layer's, and shares of the layer's neurons. @param {number} widest */
const line = (widest) => (/** @type {Layer} */ { layer, operator, neurons, mean_width, mean_unstable }) =>
  h("tr", {}, h("td", { class: "code" }, layer), h("td", { class: "muted" }, operator), h("td", { class: "right" }, number(neurons)),
    measured(fixed(mean_width), widest > 0 && mean_width !== null ? mean_width / widest : null, "--accent"),
    measured(unstable(mean_unstable, neurons), mean_unstable !== null && neurons > 0 ? mean_unstable / neurons : null, "--warn"));

/** @param {string} text @param {number | null} share @param {string} tone */
const measured = (text, share, tone) =>
  h("td", {}, h("span", { class: "measured" }, h("span", { class: "right" }, text), share !== null && rail(0, share, { tone })));

/** @param {number | null} count @param {number} of */
const unstable = (count, of) => (count === null || !(of > 0) ? "–" : `${number(count, 3)} (${((100 * count) / of).toFixed(0)}%)`);
