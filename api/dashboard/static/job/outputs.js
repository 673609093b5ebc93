/** The bounds of each output of one instance, as bars on a common scale, and its counterexample. */

import { isNumber, width } from "../lib/bounds.js";
import { fixed, many } from "../lib/format.js";
import { extent } from "../lib/scales.js";
import { copy } from "../ui/clipboard.js";
import { fill, h } from "../ui/dom.js";
import { stateMark } from "../ui/parts.js";
import { rail } from "../ui/rail.js";
import { pictured } from "./picture.js";

/** @typedef {import("../lib/types.js").BoundsRow} BoundsRow */

const MOST = 64;

export class OutputBounds {
  constructor() {
    this.element = h("div", { class: "outputs" });
    this.element.hidden = true;
  }

  /** @param {BoundsRow} row */
  show(row) {
    const close = h("button", { class: "tiny", type: "button" }, "Close");
    close.addEventListener("click", () => {
      this.element.hidden = true;
      history.replaceState(null, "", location.pathname + location.search);
    });
    const range = extent([row.lower.filter(isNumber), row.upper.filter(isNumber), [0]]) ?? [0, 1];
    const bars = row.lower.slice(0, MOST).map((low, index) => bar(index, low, row.upper[index] ?? null, range));
    const words = [row.name, isNumber(row.label) && `class ${row.label}`, isNumber(row.prediction) && `predicted ${row.prediction}`, row.method, row.decided_by && `decided by ${row.decided_by}`,
      row.reason && `undecided: ${row.reason}`, row.note, `margin ${fixed(row.margin)}`,
      `mean width ${fixed(width(row))}`];
    fill(this.element, h("header", {}, h("h3", {}, `Instance ${row.instance}`), stateMark(row.verdict),
      h("span", { class: "muted" }, words.filter(Boolean).join(" · ")), close),
      h("ol", { class: "bars" }, ...bars), row.lower.length > MOST && h("p", { class: "muted" }, `first ${MOST} of ${row.lower.length} outputs`),
      row.counterexample && pictured(row.counterexample, row), row.counterexample && counterexample(row.counterexample, row));
    this.element.hidden = false;
  }
}

/** The bar of an infinite bound ends at the edge. @param {number} index @param {number | string | null} low @param {number | string | null} high @param {[number, number]} range */
function bar(index, low, high, [from, to]) {
  const share = (/** @type {number} */ value) => (value - from) / (to - from || 1);
  return h("li", {}, h("span", { class: "muted" }, index), h("span", { class: "right" }, isNumber(low) ? fixed(low) : "−∞"),
    rail(share(isNumber(low) ? low : from), share(isNumber(high) ? high : to), { zero: share(0) }),
    h("span", {}, isNumber(high) ? fixed(high) : "∞"));
}

/** The input and the outputs there. @param {number[]} values @param {BoundsRow} row */
function counterexample(values, row) {
  const outputs = row.counterexample_outputs, runtime = row.onnxruntime_outputs;
  return h("details", {}, h("summary", {}, `Counterexample (${many(values.length, "input")})`),
    ...numbers("The counterexample", values),
    ...(outputs ? [h("h4", {}, "Outputs there, in float64"), ...numbers("The list of outputs", outputs)] : []),
    ...(runtime ? [h("h4", {}, "Outputs there, by onnxruntime"), ...numbers("The list of onnxruntime's outputs", runtime)] : []));
}

/** As many digits as it takes to have the same numbers again. @param {string} what @param {(number | null)[]} values */
function numbers(what, values) {
  const text = `[${values.map(String).join(", ")}]`;
  const shown = h("p", { class: "code values", tabindex: 0 }, text);
  const button = h("button", { class: "tiny", type: "button" }, "Copy");
  button.addEventListener("click", () => void copy(text, shown, what));
  return [button, shown];
}
