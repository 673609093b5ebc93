/** Axes for values of any kind: numbers on a line or by powers of ten, words and choices side by side. Pure. */

import { linear, linearTicks, logarithmic, logTicks, padded, stepAt, tickLabel } from "./scales.js";

/**
 * @typedef {object} Axis
 * @property {(value: unknown) => number} at position in pixels; NaN where the value has no place
 * @property {{at: number, label: string}[]} ticks
 * @property {boolean} numeric
 */

/** Numbers whose greatest is so many times the least are shown by their powers of ten. */
const WIDE = 50;
/** Words of one axis; of more only some are named. */
const NAMED = 12;

/**
 * @param {unknown[]} values what has to find a place; what is missing has none
 * @param {[number, number]} range pixels
 * @param {number} count of ticks, about
 * @param {number} [named] words that there is room for
 * @returns {Axis}
 */
export function axis(values, range, count, named = NAMED) {
  const given = values.filter((value) => value !== undefined && value !== null);
  const numbers = /** @type {number[]} */ (given.filter((value) => typeof value === "number" && Number.isFinite(value)));
  return given.length > 0 && numbers.length === given.length ? ofNumbers(numbers, range, count) : ofWords(given, range, named);
}

/** @param {number[]} numbers @param {[number, number]} range @param {number} count @returns {Axis} */
function ofNumbers(numbers, range, count) {
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const log = low > 0 && high / low >= WIDE;
  const span = padded([low, high], log);
  const scale = (log ? logarithmic : linear)(span, range);
  const ticks = (log ? logTicks : linearTicks)(span[0], span[1], count);
  return {
    at: (value) => (typeof value === "number" ? scale.at(value) : Number.NaN),
    ticks: ticks.map((tick) => ({ at: scale.at(tick), label: tickLabel(tick, stepAt(ticks, tick)) })),
    numeric: true,
  };
}

/** @param {unknown[]} given @param {[number, number]} range @param {number} named @returns {Axis} */
function ofWords(given, [from, to], named) {
  const words = [...new Set(given.map(word))].sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
  const place = new Map(words.map((one, index) => [one, from + ((index + 0.5) / words.length) * (to - from)]));
  const stride = Math.ceil(words.length / named);
  return {
    at: (value) => (value === undefined || value === null ? Number.NaN : (place.get(word(value)) ?? Number.NaN)),
    ticks: words.filter((_, index) => index % stride === 0).map((one) => ({ at: place.get(one) ?? Number.NaN, label: one })),
    numeric: false,
  };
}

/** How a value is called. @param {unknown} value */
export function word(value) {
  if (typeof value === "number") return tickLabel(Number(value.toPrecision(4)));
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "–");
}

/** The rank of each number among some values, and how many there are: asked for once for each value. @type {WeakMap<unknown[], {ranks: Map<number, number>, count: number}>} */
const ranked = new WeakMap();

/** @param {unknown[]} all */
function ranksOf(all) {
  const sorted = /** @type {number[]} */ (all.filter(Number.isFinite)).sort((one, other) => one - other);
  /** @type {Map<number, number>} */
  const ranks = new Map();
  sorted.forEach((each, rank) => ranks.has(each) || ranks.set(each, rank));
  return { ranks, count: sorted.length };
}

/**
 * Which of some shades a value has: 0 for the least, the last for the greatest, null where there is none.
 * @param {unknown} value @param {unknown[]} all @param {number} shades
 */
export function shade(value, all, shades) {
  const known = ranked.get(all) ?? ranksOf(all);
  ranked.set(all, known);
  const place = typeof value === "number" ? known.ranks.get(value) : undefined;
  if (place === undefined) return null;
  const rank = place / Math.max(known.count - 1, 1);
  return Math.min(Math.floor(rank * shades), shades - 1);
}

/**
 * The middle one of the later half of a curve: what went on most of the time, without how it began.
 * @param {readonly number[]} values
 */
export function settled(values) {
  const later = values.slice(Math.floor(values.length / 2)).filter(Number.isFinite).sort((one, other) => one - other);
  return later[Math.floor(later.length / 2)] ?? Number.NaN;
}
