/** A bar on a rail, from one share of its length to another. */

import { h } from "./dom.js";

/**
 * @param {number} from between 0 and 1
 * @param {number} to
 * @param {{zero?: number, tone?: string}} [marks] where a line stands; the name of the bar's colour
 */
export function rail(from, to, { zero, tone } = {}) {
  const bar = h("i", {});
  place(bar, from, to);
  if (tone) bar.style.setProperty("background", `var(${tone})`);
  if (zero === undefined) return h("span", { class: "rail" }, bar);
  const mark = h("b", {});
  mark.style.setProperty("left", `${100 * zero}%`);
  return h("span", { class: "rail" }, mark, bar);
}

/** @param {HTMLElement} bar @param {number} from @param {number} to */
function place(bar, from, to) {
  bar.style.setProperty("left", `${100 * from}%`);
  bar.style.setProperty("width", `${100 * (to - from)}%`);
}
