/** A counterexample of an image: the picture, and what the model takes it for. */

import { isNumber } from "../lib/bounds.js";
import { number } from "../lib/format.js";
import { picture, winners } from "../lib/picture.js";
import { h } from "../ui/dom.js";

/** @typedef {import("../lib/types.js").BoundsRow} BoundsRow */

/**
 * Null where the sample has no class, or the input is no picture.
 * @param {readonly number[]} values @param {BoundsRow} row
 */
export function pictured(values, row) {
  const drawn = isNumber(row.label) ? picture(values) : null;
  return drawn && h("figure", { class: "pictured" }, canvas(drawn), h("figcaption", {}, ...words(row)));
}

/** @param {import("../lib/picture.js").Picture} drawn */
function canvas({ side, pixels }) {
  const element = h("canvas", { width: side, height: side, role: "img", "aria-label": `The counterexample, ${side} by ${side} pixels` });
  element.getContext("2d")?.putImageData(new ImageData(new Uint8ClampedArray(pixels), side, side), 0, 0);
  return element;
}

/** @param {BoundsRow} row */
function words({ label, prediction, counterexample_outputs: outputs }) {
  const won = winners(outputs ?? []);
  const class_ = h("p", { class: "muted" }, `The sample is of class ${label}${prediction === label ? ", and the model says so" : ""}.`);
  if (!won) return [class_];
  const { first, second } = won;
  return [h("p", {}, "Taken for ", h("strong", {}, `class ${first.index}`)), class_,
    h("p", { class: "muted" }, `Class ${first.index} has ${number(first.value, 5)}, class ${second.index} ${number(second.value, 5)}.`)];
}
