/** What can be drawn of jobs over each other: the fields in which specs differ, results, speed and memory. Pure. */

import { settled } from "./axes.js";
import { compared } from "./compare.js";

/** @typedef {import("./types.js").Job} Job */
/** @typedef {{path: string, words: string, of: "spec" | "result", numeric: boolean}} Quantity */

/** What a training reports of itself while it runs, which its result does not have. */
export const MEASURED = ["samples_per_s", "tokens_per_s", "memory_gib"];
const SPEEDS = ["measured.tokens_per_s", "measured.samples_per_s"];
/** Results in the order in which people ask for them. */
const WANTED = ["eval_certified_accuracy", "certified_accuracy", "eval_accuracy", "accuracy", "verdicts.verified", "eval_loss", "loss"]
  .map((name) => `result.${name}`);

/**
 * The quantities of jobs, and each job's values of them.
 * @param {Job[]} jobs @param {(job: Job, name: string) => readonly number[]} curve what a job reported
 * @param {(job: Job) => number | null} seconds how long it ran
 * @returns {{quantities: Quantity[], values: Map<string, unknown>[]}}
 */
export function quantities(jobs, curve, seconds) {
  const { columns, cells } = compared(jobs);
  const values = jobs.map((job, index) => {
    const all = new Map([...(cells[index] ?? []), ["duration", seconds(job)], ["ranks", ranks(job)]]);
    for (const name of MEASURED) {
      const value = settled(curve(job, name));
      if (Number.isFinite(value)) all.set(`measured.${name}`, value);
    }
    return all;
  });
  const some = (/** @type {string} */ path) => values.filter((all) => typeof all.get(path) === "number").length;
  const more = ["ranks", "duration", ...MEASURED.map((name) => `measured.${name}`)].filter((path) => some(path) > 0);
  const found = [
    ...columns.map(({ path, of, numeric }) => ({ path, words: path.replace(/^result\./, ""), of, numeric })),
    ...more.map((path) => ({ path, words: path === "duration" ? "duration, s" : path.replace(/^measured\./, ""), of: /** @type {const} */ ("result"), numeric: true })),
  ];
  return { quantities: found.filter(({ path }) => path !== "ranks" || new Set(values.map((all) => all.get(path))).size > 1), values };
}

/** @param {Job} job */
const ranks = (job) => Object.values(job.parallel ?? job.spec?.parallel ?? {}).reduce((all, degree) => all * Number(degree), 1);

/**
 * What to draw first: layouts as speed against memory, else the result against the first field that differs.
 * @param {Quantity[]} all @returns {{x: string, y: string}}
 */
export function first(all) {
  const has = (/** @type {string} */ path) => all.some((one) => one.path === path);
  const speed = SPEEDS.find(has);
  if (speed && all.some(({ path }) => path.startsWith("parallel."))) {
    return { x: ["measured.memory_gib", "ranks", "duration"].find(has) ?? "", y: speed };
  }
  const numeric = all.filter((one) => one.numeric);
  const y = WANTED.find(has) ?? numeric.find(({ of }) => of === "result")?.path ?? "duration";
  const fields = chosen(all, y);
  return { x: (fields.find((one) => one.numeric) ?? fields[0])?.path ?? "duration", y };
}

/** The fields that differ, the seed last: it differs without being chosen for what it does. @param {Quantity[]} all @param {string} y */
function chosen(all, y) {
  const fields = all.filter(({ of, path }) => of === "spec" && path !== y);
  return [...fields.filter(({ path }) => path !== "seed"), ...fields.filter(({ path }) => path === "seed")];
}

/**
 * What stands side by side as parallel coordinates: some fields that differ, then the result.
 * @param {Quantity[]} all @param {string} y @param {number} most
 */
export function abreast(all, y, most) {
  const fields = chosen(all, y);
  return [...fields.slice(0, most - 1), ...all.filter(({ path }) => path === y)];
}
