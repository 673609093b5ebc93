/** Where names stand beside their points, so that none lies over another name or point. Pure. */

/** @typedef {{x: number, y: number}} Point */
/** @typedef {{left: number, right: number, top: number, bottom: number}} Box */
/** @typedef {{x: number, y: number, anchor: "start" | "end" | "middle"}} Label */

/** Pixels: of a letter of 11 px, on average; of a line; of a point; between a point and its name. */
const [LETTER, LINE, RADIUS, GAP] = [6.2, 12, 6, 9];

/**
 * The places of the names: to the right, to the left, above or below; null where all are taken.
 * @param {readonly Point[]} points @param {readonly string[]} names @param {Box} area
 * @returns {(Label | null)[]}
 */
export function places(points, names, area) {
  const taken = points.map(({ x, y }) => ({ left: x - RADIUS, right: x + RADIUS, top: y - RADIUS, bottom: y + RADIUS }));
  return points.map((point, index) => {
    const free = candidates(point).find((label) => {
      const box = boxOf(label, names[index] ?? "");
      return within(box, area) && !taken.some((other, at) => at !== index && meet(box, other));
    });
    if (free) taken.push(boxOf(free, names[index] ?? ""));
    return free ?? null;
  });
}

/** @param {Point} point @returns {Label[]} */
const candidates = ({ x, y }) => [
  { x: x + GAP, y: y + 4, anchor: "start" },
  { x: x - GAP, y: y + 4, anchor: "end" },
  { x, y: y - GAP, anchor: "middle" },
  { x, y: y + GAP + LINE - 3, anchor: "middle" },
];

/** @param {Label} label @param {string} text @returns {Box} */
function boxOf({ x, y, anchor }, text) {
  const width = widthOf(text);
  const left = anchor === "start" ? x : anchor === "end" ? x - width : x - width / 2;
  return { left, right: left + width, top: y - LINE + 2, bottom: y + 3 };
}

/** How wide a text is, about. @param {string} text */
export const widthOf = (text) => text.length * LETTER;

/** @param {Box} box @param {Box} area */
const within = (box, area) => box.left >= area.left && box.right <= area.right && box.top >= area.top - LINE && box.bottom <= area.bottom;

/** @param {Box} one @param {Box} other */
const meet = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
