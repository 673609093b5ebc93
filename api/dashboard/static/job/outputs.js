/** The bounds of each output of one instance, as bars on a common scale, and its counterexample. */

import { isNumber } from "../lib/bounds.js";
import { fixed, number } from "../lib/format.js";
import { extent } from "../lib/scales.js";
import { fill, h } from "../ui/dom.js";
import { stateMark } from "../ui/parts.js";

/** @typedef {import("../lib/types.js").BoundRow} BoundRow */

const MOST = 64;

export class OutputBounds {
  constructor() {
    this.element = h("div", { class: "outputs" });
    this.element.hidden = true;
  }

  /** @param {BoundRow} row */
  show(row) {
    const close = h("button", { class: "tiny", type: "button" }, "Close");
    close.addEventListener("click", () => {
      this.element.hidden = true;
    });
    const range = extent([row.lower.filter(isNumber), row.upper.filter(isNumber), [0]]) ?? [0, 1];
    const bars = row.lower.slice(0, MOST).map((low, index) => bar(index, low, row.upper[index] ?? null, range));
    fill(this.element, h("header", {}, h("h3", {}, `Instance ${row.instance}`), stateMark(row.verdict),
      h("span", { class: "muted" }, `${row.method} · margin ${fixed(row.margin)}`), close),
      h("ol", { class: "bars" }, ...bars), row.lower.length > MOST && h("p", { class: "muted" }, `first ${MOST} of ${row.lower.length} outputs`),
      row.counterexample && counterexample(row.counterexample));
    this.element.hidden = false;
  }
}

/** A missing bound is infinite: its bar ends at the edge. @param {number} index @param {number | null} low @param {number | null} high @param {[number, number]} range */
function bar(index, low, high, [from, to]) {
  const span = to - from || 1;
  const fillBar = h("i", {});
  const left = (((low ?? from) - from) / span) * 100;
  fillBar.style.setProperty("left", `${left}%`);
  fillBar.style.setProperty("width", `${(((high ?? to) - from) / span) * 100 - left}%`);
  const zero = h("b", {});
  zero.style.setProperty("left", `${((0 - from) / span) * 100}%`);
  return h("li", {}, h("span", { class: "muted" }, index), h("span", { class: "right" }, low === null ? "−∞" : fixed(low)),
    h("span", { class: "rail" }, zero, fillBar), h("span", {}, high === null ? "∞" : fixed(high)));
}

/** @param {number[]} values */
const counterexample = (values) =>
  h("details", {}, h("summary", {}, `Counterexample (${values.length} inputs)`),
    h("p", { class: "code values" }, values.map((value) => number(value)).join("  ")));
