/** Jobs that differ in their seed alone: the mean of their curves, and how far they spread. Pure. */

import { lowerBound } from "./decimate.js";
import { title } from "./state.js";

/** @typedef {import("./types.js").Job} Job */
/** @typedef {{x: readonly number[], y: readonly number[]}} Line */

/** What of a spec does not change what is computed, beside the seed. */
const APART = ["seed", "name", "sweep", "labels", "notify", "export", "priority"];

/**
 * The places of jobs, those together whose specs are alike but for the seed.
 * @param {readonly Job[]} jobs with their specs
 * @returns {number[][]}
 */
export function bySeed(jobs) {
  /** @type {Map<string, number[]>} */
  const found = new Map();
  jobs.forEach(({ spec }, index) => {
    const key = JSON.stringify(Object.entries(spec ?? {}).filter(([name]) => !APART.includes(name)));
    const alike = found.get(key);
    if (alike) alike.push(index);
    else found.set(key, [index]);
  });
  return [...found.values()];
}

/** What jobs that differ in their seed have in common, in a few words. @param {readonly Job[]} jobs */
export function named(jobs) {
  const [first] = jobs;
  if (!first) return "";
  const swept = Object.entries(first.parameters ?? {}).filter(([path]) => path !== "seed");
  const words = first.sweep && swept.length ? swept.map(([path, value]) => `${path}=${JSON.stringify(value)}`).join(", ") : title(first);
  return jobs.length > 1 ? `${words} (${jobs.length} seeds)` : words;
}

/**
 * The mean of some curves where all of them are, at the places of the first, with the least and the greatest.
 * @param {readonly Line[]} lines
 * @returns {{x: number[], y: number[], low: number[], high: number[]}}
 */
export function mean(lines) {
  const from = Math.max(...lines.map(({ x }) => x[0] ?? Number.POSITIVE_INFINITY));
  const to = Math.min(...lines.map(({ x }) => x.at(-1) ?? Number.NEGATIVE_INFINITY));
  const x = (lines[0]?.x ?? []).filter((at) => at >= from && at <= to);
  const values = x.map((at) => lines.map((line) => valueAt(line, at)));
  return {
    x,
    y: values.map((some) => some.reduce((sum, value) => sum + value, 0) / some.length),
    low: values.map((some) => Math.min(...some)),
    high: values.map((some) => Math.max(...some)),
  };
}

/** The value of a curve, between two of its points on the line through them. @param {Line} line @param {number} at */
function valueAt({ x, y }, at) {
  const after = lowerBound(x, at);
  const [high, next] = [x[after] ?? Number.NaN, y[after] ?? Number.NaN];
  if (high === at || after === 0) return next;
  const [low, before] = [x[after - 1] ?? Number.NaN, y[after - 1] ?? Number.NaN];
  return before + ((next - before) * (at - low)) / (high - low);
}
