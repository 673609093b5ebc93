/** Timed pieces of work in rows, as a drawing needs them. Pure. */

import { upperBound } from "./decimate.js";

/**
 * @typedef {object} Cell
 * @property {number} start
 * @property {number} end
 * @property {string} tone what is done: it decides the colour
 * @property {string} text inside, where there is room
 * @property {string} words the whole truth about it
 * @property {number | null} group cells that belong together (a micro-batch), over all rows
 * @property {boolean} [soft] drawn lighter: a rank's every other stage
 *
 * @typedef {{label: string, lanes: Cell[][]}} Row lanes lie above each other; the cells of one ascend
 * @typedef {{row: number, lane: number, index: number}} Spot
 */

/** Fewer pixels than this are not told apart. */
const LEAST_PIXELS = 1;

/**
 * From the first start to the last end; null without cells.
 * @param {readonly Row[]} rows
 * @param {(cell: Cell) => boolean} [counts]
 * @returns {[number, number] | null}
 */
export function reach(rows, counts = () => true) {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const cell of rows.flatMap((row) => row.lanes.flat())) {
    if (!counts(cell)) continue;
    low = Math.min(low, cell.start);
    high = Math.max(high, cell.end);
  }
  return low < high ? [low, high] : null;
}

/**
 * What to draw of a lane between `low` and `high`: runs of cells too narrow to be seen become one, of the first's tone.
 * @param {readonly Cell[]} cells
 * @param {number} low
 * @param {number} high
 * @param {number} pixels that the view is wide
 * @returns {{cell: Cell, start: number, end: number}[]}
 */
export function drawn(cells, low, high, pixels) {
  const least = ((high - low) / Math.max(pixels, 1)) * LEAST_PIXELS;
  /** @type {{cell: Cell, start: number, end: number}[]} */
  const kept = [];
  for (const cell of cells) {
    if (cell.end < low || cell.start > high) continue;
    const last = kept.at(-1);
    if (last && cell.end - last.start < least) last.end = Math.max(last.end, cell.end);
    else kept.push({ cell, start: cell.start, end: cell.end });
  }
  return kept;
}

/**
 * Index of the cell at a time, or of the nearest one not further than `slack`; -1 where there is none.
 * @param {readonly Cell[]} cells
 * @param {number} at
 * @param {number} slack
 */
export function cellAt(cells, at, slack) {
  const right = upperBound(cells.map((cell) => cell.start), at);
  for (let index = right - 1; index >= 0 && index >= right - 3; index -= 1) {
    const cell = cells[index];
    if (cell && at <= cell.end) return index;
  }
  const distances = [right - 1, right].map((index) => {
    const cell = cells[index];
    return cell ? Math.max(cell.start - at, at - cell.end) : Number.POSITIVE_INFINITY;
  });
  const [before = 0, after = 0] = distances;
  if (Math.min(before, after) > slack) return -1;
  return before <= after ? right - 1 : right;
}

/**
 * The view after a zoom by `factor` around `at`, never beyond `whole`.
 * @param {[number, number]} view
 * @param {[number, number]} whole
 * @param {number} at
 * @param {number} factor below 1 to see more detail
 * @returns {[number, number]}
 */
export function zoomed([low, high], [first, last], at, factor) {
  const start = at - (at - low) * factor;
  const end = at + (high - at) * factor;
  return [Math.max(start, first), Math.min(end, last)];
}

/**
 * The spot some cells further in its lane, or in the next row at about the same time; null without cells.
 * @param {readonly Row[]} rows
 * @param {Spot | null} from
 * @param {number} steps
 * @param {number} down
 * @returns {Spot | null}
 */
export function neighbour(rows, from, steps, down) {
  if (!from) return firstSpot(rows);
  const row = Math.min(Math.max(from.row + down, 0), rows.length - 1);
  const lanes = rows[row]?.lanes ?? [];
  const lane = Math.min(from.lane, lanes.length - 1);
  const cells = lanes[lane] ?? [];
  if (cells.length === 0) return from;
  const here = rows[from.row]?.lanes[from.lane]?.[from.index];
  const start = down && here ? cellAt(cells, (here.start + here.end) / 2, Number.POSITIVE_INFINITY) : from.index;
  return { row, lane, index: Math.min(Math.max(start + steps, 0), cells.length - 1) };
}

/** @param {readonly Row[]} rows @returns {Spot | null} */
function firstSpot(rows) {
  const row = rows.findIndex((one) => one.lanes.some((lane) => lane.length > 0));
  if (row < 0) return null;
  const lanes = rows[row]?.lanes ?? [];
  const lane = lanes.findLastIndex((cells) => cells.length > 0);
  return { row, lane, index: 0 };
}
