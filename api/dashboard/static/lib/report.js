/** A compile report as the page shows it. Reports may lack any part: a rung that failed has little to tell. Pure. */

import { number } from "./format.js";

/** @typedef {Record<string, any>} Rung */

/** Verdicts that mean the rung may be used. */
const SAFE = new Set(["passed", "pass", "safe", "ok"]);

/**
 * One word of the few that the page has colours for, whatever the report calls it.
 * @param {Rung} rung
 */
export function tone(rung) {
  const verdict = String(rung.verdict ?? "").toLowerCase();
  if (SAFE.has(verdict)) return "passed";
  if (["vacuous", "frozen", "timeout", "unknown"].includes(verdict)) return verdict;
  if (verdict === "unstable") return "unknown";
  return verdict.startsWith("skip") || verdict === "not_reached" || verdict === "" ? "skipped" : "failed";
}

/**
 * Compiled step time as a part of eager's; below one is faster. Null when either is missing.
 * @param {Rung} rung
 */
export function ratio(rung) {
  const own = middle(rung.step_ms);
  const eager = middle(rung.eager_step_ms);
  return own !== null && eager !== null && eager > 0 ? own / eager : null;
}

/** A number, or the median of an object that holds one. @param {unknown} value @returns {number | null} */
export function middle(value) {
  if (typeof value === "number") return value;
  if (value && typeof value === "object") return middle(/** @type {Record<string, unknown>} */ (value).median);
  return null;
}

/**
 * Named numbers and words of a part of a report, nested ones under dotted names.
 * @param {unknown} part
 * @param {string} [prefix]
 * @returns {[string, string][]}
 */
export function entries(part, prefix = "") {
  if (part === null || part === undefined) return [];
  if (typeof part !== "object") return [[prefix || "value", scalar(part)]];
  if (Array.isArray(part) && part.length === 0) return [];
  if (Array.isArray(part) && part.every((entry) => typeof entry !== "object")) return [[prefix, part.map(scalar).join(", ")]];
  return Object.entries(part).flatMap(([key, value]) => entries(value, prefix ? `${prefix}.${key}` : key));
}

/** @param {unknown} value */
const scalar = (value) => (typeof value === "number" ? number(value, 3) : String(value));

/**
 * Where something happened and why, from an entry of a list of graph breaks, recompiles or skips.
 * @param {unknown} entry a string, or an object with a reason and a place
 * @returns {{reason: string, place: string, count: number | null}}
 */
export function cause(entry) {
  if (entry === null || typeof entry !== "object") return { reason: String(entry), place: "", count: null };
  const { reason, message, guard, file, filename, line, lineno, location, count, ...rest } = /** @type {Record<string, any>} */ (entry);
  const where = [file ?? filename, line ?? lineno].filter((part) => part !== undefined && part !== null).join(":");
  const words = reason ?? guard ?? message;
  const place = typeof location === "string" ? location : where;
  const more = entries(rest).map(([name, value]) => `${name} ${value}`).join(", ");
  return { reason: words === undefined ? more : String(words), place, count: typeof count === "number" ? count : null };
}

/**
 * How far the rung is from eager: the largest of the numbers called an error or a difference.
 * @param {Rung} rung
 */
export function worst(rung) {
  const found = numbers(rung.parity);
  return found.length ? Math.max(...found) : null;
}

/** @param {unknown} part @param {string} [name] @returns {number[]} */
function numbers(part, name = "") {
  if (typeof part === "number") return /err|diff|abs|max/i.test(name) && !/ratio|toler|limit/i.test(name) ? [part] : [];
  if (part === null || typeof part !== "object") return [];
  return Object.entries(part).flatMap(([key, value]) => numbers(value, `${name}.${key}`));
}

/** @param {unknown} list */
export const many = (list) => (Array.isArray(list) ? list : list && typeof list === "object" ? Object.values(list) : []);
