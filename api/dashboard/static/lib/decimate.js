/** Fewer points, same picture. Pure. */

/**
 * Keeps, of each pixel column, the first, lowest, highest and last point and the first gap in their order, so that a
 * drawn line shows every extreme whatever the zoom. Points that are not finite are gaps.
 *
 * @param {readonly number[]} x ascending
 * @param {readonly number[]} y as many
 * @param {number} low left edge of the view
 * @param {number} high right edge of the view
 * @param {number} columns pixels
 * @returns {{x: number[], y: number[]}} at most 5 points a column, and one neighbour beyond each edge
 */
export function decimate(x, y, low, high, columns) {
  const first = Math.max(lowerBound(x, low) - 1, 0);
  const last = Math.min(upperBound(x, high), x.length - 1);
  if (last - first < columns * 2) return { x: x.slice(first, last + 1), y: y.slice(first, last + 1) };
  const keep = { x: /** @type {number[]} */ ([]), y: /** @type {number[]} */ ([]) };
  const scale = columns / (high - low || 1);
  for (let index = first; index <= last; ) {
    const column = Math.floor((at(x, index) - low) * scale);
    let end = index;
    while (end < last && Math.floor((at(x, end + 1) - low) * scale) === column) end += 1;
    for (const kept of extremes(y, index, end)) {
      keep.x.push(at(x, kept));
      keep.y.push(at(y, kept));
    }
    index = end + 1;
  }
  return keep;
}

/**
 * @param {readonly number[]} y
 * @param {number} start
 * @param {number} end inclusive
 * @returns {number[]} ascending indices
 */
function extremes(y, start, end) {
  let lowest = start;
  let highest = start;
  let gap = start;
  for (let index = start; index <= end; index += 1) {
    if (!Number.isFinite(at(y, index))) {
      if (Number.isFinite(at(y, gap))) gap = index;
      continue;
    }
    if (!Number.isFinite(at(y, lowest)) || at(y, index) < at(y, lowest)) lowest = index;
    if (!Number.isFinite(at(y, highest)) || at(y, index) > at(y, highest)) highest = index;
  }
  return [...new Set([start, lowest, highest, gap, end])].sort((a, b) => a - b);
}

/** @param {readonly number[]} values @param {number} index @returns {number} */
const at = (values, index) => /** @type {number} */ (values[index]);

/**
 * Index of the first value that is not below `bound`.
 * @param {readonly number[]} values ascending
 * @param {number} bound
 */
export const lowerBound = (values, bound) => search(values, (value) => value >= bound);

/**
 * Index of the first value above `bound`.
 * @param {readonly number[]} values ascending
 * @param {number} bound
 */
export const upperBound = (values, bound) => search(values, (value) => value > bound);

/** @param {readonly number[]} values @param {(value: number) => boolean} reached */
function search(values, reached) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reached(at(values, middle))) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * Index of the value nearest to `target`; -1 of an empty array.
 * @param {readonly number[]} values ascending
 * @param {number} target
 */
export function nearest(values, target) {
  const right = lowerBound(values, target);
  if (right === 0) return values.length ? 0 : -1;
  if (right === values.length) return right - 1;
  return target - at(values, right - 1) <= at(values, right) - target ? right - 1 : right;
}
