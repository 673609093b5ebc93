/** Rows of a verification job, and what they add up to. Pure. */

/** @typedef {import("./types.js").BoundsRow} BoundsRow */

export const VERDICTS = /** @type {const} */ (["verified", "falsified", "unknown", "timeout"]);

/**
 * How many rows have each verdict.
 * @param {Iterable<BoundsRow>} rows
 * @returns {Record<string, number>}
 */
export function counts(rows) {
  /** @type {Record<string, number>} */
  const found = Object.fromEntries(VERDICTS.map((verdict) => [verdict, 0]));
  for (const row of rows) found[row.verdict] = (found[row.verdict] ?? 0) + 1;
  return found;
}

/**
 * Mean distance between upper and lower bounds of a row; null where there is none that is finite.
 * @param {BoundsRow} row
 */
export function width(row) {
  const widths = row.lower.flatMap((low, index) => {
    const high = row.upper[index];
    return typeof low === "number" && typeof high === "number" ? [high - low] : [];
  });
  return widths.length ? widths.reduce((sum, one) => sum + one, 0) / widths.length : null;
}

/**
 * The lowest of the lower bounds and the highest of the upper ones; null where one is missing (not finite).
 * @param {BoundsRow} row
 * @returns {[number | null, number | null]}
 */
export const span = (row) => [
  row.lower.length && row.lower.every(isNumber) ? Math.min(...row.lower.filter(isNumber)) : null,
  row.upper.length && row.upper.every(isNumber) ? Math.max(...row.upper.filter(isNumber)) : null,
];

/**
 * The model and the query of a row of `instances.csv`, which names both with a space between. Paths may have spaces.
 * @param {string | null | undefined} name
 * @returns {[model: string, query: string]}
 */
export function pair(name) {
  const [, model = "", query = ""] = /^(.+?\.onnx(?:\.gz)?) (.+)$/i.exec(name ?? "") ?? /^(\S+) (.+)$/.exec(name ?? "") ?? [];
  return [model, query];
}

const LONG = 24;

/**
 * Shortens long names to where those that are much alike differ: what these have in common at either end becomes "…".
 * @param {Iterable<string>} names
 * @returns {(name: string) => string}
 */
export function telling(names) {
  /** @type {string[][]} */
  const groups = [];
  for (const name of [...new Set(names)].sort()) {
    const last = groups.at(-1);
    const before = last?.at(-1) ?? "";
    if (last && 3 * shared([before, name], 1) >= Math.min(before.length, name.length)) last.push(name);
    else groups.push([name]);
  }
  const short = new Map(groups.flatMap((group) => group.map((name) => /** @type {const} */ ([name, middle(name, group)]))));
  return (name) => short.get(name) ?? name;
}

/** @param {string} name @param {string[]} group */
function middle(name, group) {
  if (group.length < 2 || name.length <= LONG) return name;
  const head = name.slice(0, shared(group, 1)).replace(/[^/_.\- ]+$/, "").length;
  const rests = group.map((each) => each.slice(head));
  const alike = shared(rests, -1);
  const tail = alike === 0 ? 0 : name.slice(-alike).replace(/^[^/_.\- ]+/, "").length;
  const [start, end] = widened(name, head, name.length - tail);
  return `${start ? "…" : ""}${name.slice(start, end)}${end < name.length ? "…" : ""}`;
}

/** By the words around, as far as there is room. @param {string} name @param {number} start @param {number} end @returns {[number, number]} */
function widened(name, start, end) {
  const side = Math.max(Math.floor((LONG - 6 - (end - start)) / 2), 0);
  const between = (/** @type {number} */ at) => /[/_.\- ]/.test(name.charAt(at));
  let [first, last] = [Math.max(start - side, 0), Math.min(end + side, name.length)];
  while (first > 0 && first < start && !between(first - 1)) first += 1;
  while (last < name.length && last > end && !between(last)) last -= 1;
  return [first, last];
}

/** How many letters all have in common at their beginning, or for a step of -1 at their end. @param {string[]} names @param {1 | -1} step */
function shared(names, step) {
  const [first = "", ...others] = names;
  const most = Math.min(...names.map((name) => name.length));
  const letter = (/** @type {string} */ name, /** @type {number} */ at) => name.at(step === 1 ? at : -1 - at);
  let count = 0;
  while (count < most && others.every((name) => letter(name, count) === letter(first, count))) count += 1;
  return count;
}

/** @param {number | string | null | undefined} value @returns {value is number} */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/**
 * @typedef {object} Column rows that share a pixel column
 * @property {number} at the middle of the group as a position in all rows
 * @property {BoundsRow | null} least the row of the lowest margin; null where none has one
 * @property {number} high the highest margin
 * @property {BoundsRow | null} bare a row without margin, a falsified one if there is any
 */

/**
 * Rows gathered into at most `columns` groups of neighbours.
 * @param {readonly BoundsRow[]} rows in the order of the axis
 * @param {number} columns
 * @returns {Column[]}
 */
export function gather(rows, columns) {
  const size = Math.max(Math.ceil(rows.length / Math.max(columns, 1)), 1);
  /** @type {Column[]} */
  const found = [];
  for (let start = 0; start < rows.length; start += size) {
    const group = rows.slice(start, start + size);
    found.push({ at: start + (group.length - 1) / 2, ...gathered(group) });
  }
  return found;
}

/** @param {BoundsRow[]} group @returns {Omit<Column, "at">} */
function gathered(group) {
  const margins = group.map((row) => row.margin).filter(isNumber);
  const low = Math.min(...margins);
  const without = group.filter((row) => !isNumber(row.margin));
  return {
    least: group.find((row) => row.margin === low) ?? null,
    high: Math.max(...margins),
    bare: without.find((row) => row.verdict === "falsified") ?? without[0] ?? null,
  };
}

/** Where a row stands among margins: one without stands before all others, unless it is verified. @param {BoundsRow} row */
const rank = (row) => row.margin ?? (row.verdict === "verified" ? Number.MAX_VALUE : -Number.MAX_VALUE);

/**
 * Rows by instance or by margin.
 * @param {Iterable<BoundsRow>} rows
 * @param {"instance" | "margin"} order
 */
export const ordered = (rows, order) =>
  [...rows].sort((a, b) => (order === "margin" ? rank(a) - rank(b) : 0) || a.instance - b.instance);
