/** Rows of a verification job, and what they add up to. Pure. */

/** @typedef {import("./types.js").BoundRow} BoundRow */

export const VERDICTS = /** @type {const} */ (["verified", "falsified", "unknown", "timeout"]);

/**
 * How many rows have each verdict.
 * @param {Iterable<BoundRow>} rows
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
 * @param {BoundRow} row
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
 * @param {BoundRow} row
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

/** @param {number | null} value @returns {value is number} */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** @typedef {{at: number, low: number, high: number, worst: BoundRow}} Column rows that share a pixel column */

/**
 * Rows gathered into at most `columns` groups of neighbours, each with its lowest and highest margin.
 * @param {readonly BoundRow[]} rows in the order of the axis, all with a margin
 * @param {number} columns
 * @returns {Column[]} `at` is the middle of the group as a position in `rows`
 */
export function gather(rows, columns) {
  const size = Math.max(Math.ceil(rows.length / Math.max(columns, 1)), 1);
  /** @type {Column[]} */
  const found = [];
  for (let start = 0; start < rows.length; start += size) {
    const group = rows.slice(start, start + size);
    const margins = group.map(margin);
    const low = Math.min(...margins);
    const worst = /** @type {BoundRow} */ (group[margins.indexOf(low)]);
    found.push({ at: start + (group.length - 1) / 2, low, high: Math.max(...margins), worst });
  }
  return found;
}

/** @param {BoundRow} row */
export const margin = (row) => row.margin ?? Number.NaN;

/**
 * Rows that can be drawn, by instance or by margin.
 * @param {Iterable<BoundRow>} rows
 * @param {"instance" | "margin"} order
 */
export function drawable(rows, order) {
  const found = [...rows].filter((row) => Number.isFinite(row.margin));
  return found.sort((a, b) => (order === "margin" ? margin(a) - margin(b) : 0) || a.instance - b.instance);
}
