/** Inputs of a model as pictures, where they are ones. Pure. */

import { extent } from "./scales.js";

/**
 * @typedef {object} Picture
 * @property {number} side in pixels
 * @property {Uint8ClampedArray} pixels red, green, blue and opacity, row by row
 */

const SMALLEST = 6;

/**
 * A square picture of grey or coloured (channels first) pixels, from 0 to 1, or from the least to the greatest value
 * where they go far beyond; null where as many numbers are no such picture.
 * @param {readonly number[]} values
 * @returns {Picture | null}
 */
export function picture(values) {
  const channels = [1, 3].find((count) => Number.isInteger(Math.sqrt(values.length / count)) && values.length % count === 0);
  if (!channels || !values.every(Number.isFinite)) return null;
  const area = values.length / channels;
  const side = Math.sqrt(area);
  if (side < SMALLEST) return null;
  const [least, most] = extent([values]) ?? [0, 1];
  const [from, to] = least >= -0.5 && most <= 1.5 ? [0, 1] : [least, most];
  const pixels = new Uint8ClampedArray(4 * area);
  for (let index = 0; index < area; index += 1) {
    for (let channel = 0; channel < 3; channel += 1) {
      const value = values[channels === 3 ? channel * area + index : index] ?? 0;
      pixels[4 * index + channel] = Math.round((255 * (value - from)) / (to - from || 1));
    }
    pixels[4 * index + 3] = 255;
  }
  return { side, pixels };
}

/**
 * What is between two inputs: as a picture, grey where they are the same, and as the largest entry and the length of the
 * difference; null where they are no pictures of the same size.
 * @param {readonly number[]} from
 * @param {readonly number[]} to
 * @returns {{picture: Picture, most: number, norm: number} | null}
 */
export function apart(from, to) {
  if (from.length !== to.length) return null;
  const moved = to.map((value, index) => value - (from[index] ?? 0));
  const most = Math.max(0, ...(extent([moved]) ?? []).map(Math.abs)); // a picture has too many numbers for one call
  const drawn = picture(moved.map((value) => 0.5 + value / (2 * most || 1)));
  return drawn && { picture: drawn, most, norm: most * Math.sqrt(moved.reduce((sum, value) => sum + (value / (most || 1)) ** 2, 0)) };
}

/**
 * The class that wins, and the one behind it; null where fewer than two outputs are numbers.
 * @param {readonly (number | null)[]} outputs
 */
export function winners(outputs) {
  const found = outputs.flatMap((value, index) => (typeof value === "number" ? [{ index, value }] : []));
  const [first, second] = found.sort((one, other) => other.value - one.value);
  return first && second ? { first, second } : null;
}
