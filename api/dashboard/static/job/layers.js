/** How wide the bounds are inside the network, layer by layer, once a verification job is over. */

import { fixed, many, number } from "../lib/format.js";
import { fill, h, setAttribute } from "../ui/dom.js";
import { withHeadings } from "../ui/parts.js";
import { rail } from "../ui/rail.js";
import { Section } from "./section.js";

const COLUMNS = ["Layer", "Operator", "Neurons", "Mean width", "Unstable"];
/** @type {Record<string, string>} */
const EXPLAINED = {
  "Mean width": "The mean over all neurons. A neuron that a tighter bound would not help, such as a ReLU of known sign, keeps the width of its interval.",
  Unstable: "Neurons that a tighter bound would help, such as ReLUs of unknown sign.",
};

/** @typedef {{layer: string, operator: string, neurons: number, mean_width: number | null, mean_unstable: number | null}} Layer */

export class Layers extends Section {
  constructor() {
    super("Bounds by layer", "layers");
    this.element.hidden = true;
    this.shown = "";
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    /** @type {Layer[]} */
    const layers = Array.isArray(job.result?.layers) ? job.result.layers : [];
    this.element.hidden = layers.length === 0;
    // What was unfolded stays so while the job is looked at again.
    const signature = JSON.stringify(layers);
    if (signature === this.shown) return;
    this.shown = signature;
    const groups = job.spec.property?.instances ? byModel(layers) : new Map([["", layers]]);
    this.remark([groups.size > 1 && many(groups.size, "model"), many(layers.length, "nonlinear layer"), "means per instance"].filter(Boolean).join(" · "));
    const head = h("tr", {}, ...COLUMNS.map((name, index) => h("th", { scope: "col", class: index === 2 ? "right" : null, title: EXPLAINED[name] ?? null }, name)));
    const bodies = [...groups].flatMap(([model, own], index) => group(model, own, index === 0));
    const table = h("table", { class: "table cards" }, h("thead", {}, head), ...bodies);
    withHeadings(table);
    fill(this.body, h("div", { class: "scroll" }, table));
  }
}

/** Layers of several models are named `MODEL: LAYER`. @param {Layer[]} layers */
function byModel(layers) {
  /** @type {Map<string, Layer[]>} */
  const groups = new Map();
  for (const one of layers) {
    const [, model = "", layer = one.layer] = /^(.+?): (.+)$/.exec(one.layer) ?? [];
    const own = groups.get(model) ?? [];
    own.push({ ...one, layer });
    groups.set(model, own);
  }
  return groups;
}

/** The layers of a model, below its name where it has one. @param {string} model @param {Layer[]} layers @param {boolean} unfolded */
function group(model, layers, unfolded) {
  const widest = Math.max(0, ...layers.map(({ mean_width }) => mean_width ?? 0));
  const body = h("tbody", {}, ...layers.map(line(widest)));
  if (!model) return [body];
  body.hidden = !unfolded;
  const open = h("button", { class: "link", type: "button", "aria-expanded": String(unfolded) }, model);
  open.addEventListener("click", () => {
    body.hidden = !body.hidden;
    setAttribute(open, "aria-expanded", String(!body.hidden));
  });
  const heading = h("th", { colspan: COLUMNS.length, scope: "rowgroup" }, open, h("span", { class: "muted" }, ` ${many(layers.length, "layer")}`));
  return [h("tbody", { class: "model" }, h("tr", {}, heading)), body];
}

/** Bars are lengths of the model's widest layer's, and shares of the layer's neurons. @param {number} widest */
const line = (widest) => (/** @type {Layer} */ { layer, operator, neurons, mean_width, mean_unstable }) =>
  h("tr", {}, h("td", { class: "code" }, layer), h("td", { class: "muted" }, operator), h("td", { class: "right" }, number(neurons)),
    measured(fixed(mean_width), widest > 0 && mean_width !== null ? mean_width / widest : null, "--accent"),
    measured(unstable(mean_unstable, neurons), mean_unstable !== null && neurons > 0 ? mean_unstable / neurons : null, "--warn"));

/** @param {string} text @param {number | null} share @param {string} tone */
const measured = (text, share, tone) =>
  h("td", {}, h("span", { class: "measured" }, h("span", { class: "right" }, text), share !== null && rail(0, share, { tone })));

/** @param {number | null} count @param {number} of */
const unstable = (count, of) => (count === null || !(of > 0) ? "–" : `${number(count, 3)} (${((100 * count) / of).toFixed(0)}%)`);
