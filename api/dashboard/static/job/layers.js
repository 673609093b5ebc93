/** How wide the bounds are inside the network, layer by layer, once a verification job is over. */

import { fixed, many, number } from "../lib/format.js";
import { fill, h } from "../ui/dom.js";
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
    const head = h("tr", {}, ...COLUMNS.map((name, index) => h("th", { scope: "col", class: index > 1 ? "right" : null }, name)));
    fill(this.body, h("div", { class: "scroll" }, h("table", { class: "table" }, h("thead", {}, head), h("tbody", {}, ...layers.map(line)))));
  }
}

/** @param {{layer: string, operator: string, neurons: number, mean_width: number | null, mean_unstable: number | null}} one */
const line = ({ layer, operator, neurons, mean_width, mean_unstable }) =>
  h("tr", {}, h("td", { class: "code" }, layer), h("td", { class: "muted" }, operator),
    ...[number(neurons), fixed(mean_width), unstable(mean_unstable, neurons)].map((value) => h("td", { class: "right" }, value)));

/** @param {number | null} count @param {number} of */
const unstable = (count, of) => (count === null || !(of > 0) ? "–" : `${number(count, 3)} (${((100 * count) / of).toFixed(0)}%)`);
