/** Numbers, times and sizes as people read them. Pure: no DOM, the present time is an argument. */

const THIN = "\u202f";
const MINUS = "\u2212";
const DAY = 86_400;

/**
 * A number with about `digits` significant digits: 0.1234, 12.35, 1,234, 1.2e−5.
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e9) return signed(value.toExponential(Math.min(digits - 1, 2)).replace("e+", "e"));
  if (Number.isInteger(value)) return signed(group(value.toFixed(0)));
  const whole = Math.floor(Math.log10(size)) + 1;
  return signed(group(value.toFixed(Math.max(digits - whole, 0))));
}

/**
 * A number for a column: three decimals, so that points align; very small or large ones as `number` shows them.
 * @param {number | null | undefined} value
 */
export function fixed(value) {
  if (typeof value !== "number" || value === 0) return number(value);
  const size = Math.abs(value);
  return size >= 5e-4 && size < 1e5 ? signed(group(value.toFixed(3))) : number(value, 3);
}

/**
 * The size of an error: one digit and its power of ten, `3.4e−6`.
 * @param {number | null | undefined} value
 */
export function magnitude(value) {
  if (typeof value !== "number" || value === 0 || !Number.isFinite(value)) return number(value);
  return signed(value.toExponential(1).replace("e+", "e"));
}

/** @param {string} text */
const signed = (text) => text.replaceAll("-", MINUS);

/** @param {string} text digits, with an optional fraction */
function group(text) {
  const [whole = "", fraction] = text.split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  return fraction === undefined ? grouped : `${grouped}.${fraction}`;
}

/**
 * @param {number | null | undefined} fraction between 0 and 1
 * @param {number} [decimals]
 */
export function percent(fraction, decimals = 0) {
  if (fraction === null || fraction === undefined || !Number.isFinite(fraction)) return "–";
  return `${(fraction * 100).toFixed(decimals)}${THIN}%`;
}

/** @param {number | null | undefined} count */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  if (count < 1000) return `${count}${THIN}B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = count / 1000;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 ? value.toFixed(1) : value.toFixed(0)}${THIN}${units[unit]}`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `0${THIN}s`;
  if (seconds < 1) return `${Math.round(seconds * 1000)}${THIN}ms`;
  if (seconds < 10) return `${(Math.floor(seconds * 10) / 10).toFixed(1)}${THIN}s`;
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole}${THIN}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}${THIN}min ${two(whole % 60)}${THIN}s`;
  if (whole < DAY) return `${Math.floor(whole / 3600)}${THIN}h ${two(Math.floor((whole % 3600) / 60))}${THIN}min`;
  return `${Math.floor(whole / DAY)}${THIN}d ${Math.floor((whole % DAY) / 3600)}${THIN}h`;
}

/** A duration without the parts that are zero: `2 min`, `1 min 30 s`, `1 h`. @param {number} seconds */
export const span = (seconds) => duration(seconds).replace(/^0\D+ (?=\d)/, "").replace(/ 0?0\D+$/, "");

/** @param {number} value */
const two = (value) => String(value).padStart(2, "0");

/**
 * How long ago, coarsely: `now`, `40 s ago`, `5 min ago`, `3 h ago`, `2 d ago`.
 * @param {number} then Unix seconds
 * @param {number} now Unix seconds
 */
export function ago(then, now) {
  const seconds = Math.max(now - then, 0);
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)}${THIN}s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}${THIN}min ago`;
  if (seconds < DAY) return `${Math.floor(seconds / 3600)}${THIN}h ago`;
  return `${Math.floor(seconds / DAY)}${THIN}d ago`;
}

/**
 * Unix seconds of an ISO time; null stays null.
 * @param {string | null | undefined} iso
 */
export const unix = (iso) => (iso ? Date.parse(iso) / 1000 : null);

/** @param {number} seconds Unix seconds; local wall-clock time with milliseconds cut */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
}

/** @param {number | null} seconds Unix seconds; local date and time */
export function dateTime(seconds) {
  if (seconds === null) return "–";
  const date = new Date(seconds * 1000);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${clock(seconds)}`;
}

/**
 * A count with its noun: `1 line`, `20 lines`.
 * @param {number} count
 * @param {string} noun
 * @param {string} [nouns]
 */
export const many = (count, noun, nouns = `${noun}s`) => `${number(count)} ${count === 1 ? noun : nouns}`;

/**
 * Indices as ranges: `0–3, 6`.
 * @param {readonly number[]} indices
 */
export function ranges(indices) {
  const sorted = [...indices].sort((a, b) => a - b);
  /** @type {[number, number][]} */
  const runs = [];
  for (const index of sorted) {
    const last = runs.at(-1);
    if (last && index <= last[1] + 1) last[1] = index;
    else runs.push([index, index]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

/**
 * Where an attempt runs: `gpu-a cuda 0–3 + gpu-b cuda 0`.
 * @param {readonly import("./types.js").HostShare[]} shares
 */
export const placement = (shares) =>
  shares.map((share) => `${share.host} ${share.pool ?? ""} ${ranges(share.devices)}`.replace(/ +/g, " ")).join(" + ");

/**
 * The parallel degrees above one: `pp 2 × tp 4`; a single device when there are none.
 * @param {Record<string, number> | undefined} parallel
 */
export function mesh(parallel) {
  const degrees = Object.entries(parallel ?? {}).filter(([, degree]) => degree > 1);
  return degrees.length ? degrees.map(([name, degree]) => `${name.replace("_", " ")} ${degree}`).join(" × ") : "1 device";
}

/**
 * Removes terminal colours and other control sequences, which a page cannot show.
 * @param {string} text
 */
export const plain = (text) =>
  // eslint-disable-next-line no-control-regex
  text.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007]*(\u0007|$)|[\u0000-\u0008\u000b-\u001f\u007f]/g, "");

/**
 * Text with characters that would turn the direction of what follows, or that show nothing, as escapes: a name must not
 * rearrange the page around it. Line feeds and tabs stay.
 * @param {string} text
 */
export const visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]/g,
    (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
