/** A counterexample of an image: the sample, the counterexample, what is between them, and the scores of both. */

import { isNumber } from "../lib/bounds.js";
import { number } from "../lib/format.js";
import { apart, picture, winners } from "../lib/picture.js";
import { h } from "../ui/dom.js";

/** @typedef {import("../lib/types.js").BoundsRow} BoundsRow */

/**
 * Null where the sample has no class, or the input is no picture.
 * @param {readonly number[]} values @param {BoundsRow} row
 */
export function pictured(values, row) {
  const drawn = isNumber(row.label) ? picture(values) : null;
  if (!drawn) return null;
  const { sample } = row;
  const before = sample && picture(sample);
  const between = sample && apart(sample, values);
  const counterexample = figure("The counterexample", drawn, row.counterexample_outputs, before ? "" : words(row));
  if (!before || !between) return h("div", { class: "pictures" }, counterexample);
  return h("div", { class: "pictures" }, figure("The sample", before, row.sample_outputs, `Of class ${row.label}.`), counterexample,
    figure("The difference", between.picture, null, `At most ${number(between.most, 3)} in an input; ${number(between.norm, 3)} in all (L2).`));
}

/** @param {string} name @param {import("../lib/picture.js").Picture} drawn @param {readonly (number | null)[] | null | undefined} outputs @param {string} told */
function figure(name, drawn, outputs, told) {
  const won = winners(outputs ?? []);
  const scores = won && `Class ${won.first.index} has ${number(won.first.value, 5)}, class ${won.second.index} ${number(won.second.value, 5)}.`;
  return h("figure", { class: "pictured" }, canvas(name, drawn), h("figcaption", {}, h("strong", {}, name),
    won && h("p", {}, "Taken for ", h("strong", {}, `class ${won.first.index}`)), told && h("p", { class: "muted" }, told), scores && h("p", { class: "muted" }, scores)));
}

/** @param {string} name @param {import("../lib/picture.js").Picture} drawn */
function canvas(name, { side, pixels }) {
  const element = h("canvas", { width: side, height: side, role: "img", "aria-label": `${name}, ${side} by ${side} pixels` });
  element.getContext("2d")?.putImageData(new ImageData(new Uint8ClampedArray(pixels), side, side), 0, 0);
  return element;
}

/** What is told of the sample where it is not beside it. @param {BoundsRow} row */
const words = ({ label, prediction, decided_by: by }) =>
  by === "witness" ? `It is the sample itself, of class ${label}.` : `The sample is of class ${label}${prediction === label ? ", and the model says so" : ""}.`;
