/** The columns of the job list and its order, as the page's address keeps them. Pure: the present time is an argument. */

import { flat, order } from "./compare.js";
import { measure } from "./headline.js";
import { ran, title } from "./state.js";

/** @typedef {import("./types.js").Job} Job */

/** Columns that can be left out, with their headings; the state and the name are always there. @type {ReadonlyMap<string, string>} */
export const COLUMNS = new Map([
  ["kind", "Kind"], ["outcome", "Progress or result"], ["owner", "Owner"], ["priority", "Priority"], ["where", "Runs on"],
  ["duration", "Duration"], ["age", "Submitted"],
]);
const RESULT = "result.";
/** Columns with numbers, which stand on the right. */
const NUMERIC = new Set(["priority", "duration", "age"]);
/** A number of a result deeper than this is no column. */
const DEEPEST = 3;

/** @param {string} name */
export const isMeasure = (name) => name.startsWith(RESULT);

/** @param {string} name */
export const isRight = (name) => NUMERIC.has(name) || isMeasure(name);

/** @param {string} name */
export const heading = (name) =>
  COLUMNS.get(name) ?? { status: "State", what: "Name" }[name] ?? name.slice(RESULT.length).replaceAll("_", " ");

/** The columns that an address asks for. @param {string} address a query string */
export function columnsOf(address) {
  const given = new URLSearchParams(address).get("columns");
  if (given === null) return [...COLUMNS.keys()];
  return [...new Set(given.split(","))].filter((name) => COLUMNS.has(name) || (isMeasure(name) && name !== RESULT));
}

/**
 * The address with a column more, or less. Measures come before the columns that tell when.
 * @param {string} address @param {string} name
 */
export function withColumn(address, name) {
  const shown = columnsOf(address);
  const wanted = shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name];
  const rank = (/** @type {string} */ one) => (isMeasure(one) ? 1.5 : [...COLUMNS.keys()].indexOf(one));
  const sorted = wanted.map((one, index) => ({ one, index })).sort((a, b) => rank(a.one) - rank(b.one) || a.index - b.index).map(({ one }) => one);
  const changed = new URLSearchParams(address);
  if (sorted.join() === [...COLUMNS.keys()].join()) changed.delete("columns");
  else changed.set("columns", sorted.join());
  return changed.toString();
}

/**
 * The column by which an address wants the list sorted; null where it comes in the service's order.
 * @param {string} address
 */
export function sortOf(address) {
  const given = new URLSearchParams(address).get("sort") ?? "";
  const by = given.replace(/^-/, "");
  return by && (COLUMNS.has(by) || by === "status" || by === "what" || isMeasure(by)) ? { by, descending: given.startsWith("-") } : null;
}

/**
 * The address after a click on a heading: sorted by it, numbers from the largest; then the other way round; then as before.
 * @param {string} address @param {string} by
 */
export function withSort(address, by) {
  const before = sortOf(address);
  const changed = new URLSearchParams(address);
  const first = isRight(by) || by === "outcome";
  for (const name of ["sort", "cursor", "from"]) changed.delete(name);
  if (before?.by !== by) changed.set("sort", first ? `-${by}` : by);
  else if (before.descending === first) changed.set("sort", first ? by : `-${by}`);
  return changed.toString();
}

/** The numbers that results of these jobs have, by their paths. @param {Job[]} jobs */
export function measures(jobs) {
  const found = jobs.flatMap((job) => [...flat(job.result ?? {}, "result")]);
  return [...new Set(found.filter(([path, value]) => typeof value === "number" && path.split(".").length <= DEEPEST).map(([path]) => path))].sort();
}

/**
 * What a job has in a column, to be compared with others.
 * @param {Job} job @param {string} by @param {number} now Unix seconds
 * @returns {unknown}
 */
export function valueOf(job, by, now) {
  if (isMeasure(by)) return flat(job.result ?? {}, "result").get(by);
  if (by === "duration") return ran(job, now);
  if (by === "age") return Date.parse(job.created_at);
  if (by === "outcome") return measure(job);
  if (by === "where") return job.placement.map(({ host }) => host).join() || null;
  if (by === "what") return title(job);
  return { status: job.state, kind: job.kind, owner: job.owner, priority: job.priority }[by];
}

/**
 * Jobs in the order that an address asks for.
 * @param {Job[]} jobs @param {string} address @param {number} now
 */
export function sorted(jobs, address, now) {
  const wanted = sortOf(address);
  if (!wanted) return jobs;
  const values = jobs.map((job) => valueOf(job, wanted.by, now));
  return order(values, wanted.descending).map((index) => /** @type {Job} */ (jobs[index]));
}
