/** A spec as indented lines, close to the YAML that people submit. Pure. */

/** @typedef {{indent: number, key: string | null, value: string | null, kind: "text" | "number" | "word", item: boolean}} Line */

const PLAIN = /^(?!\.[\dinIN])[A-Za-z_./][\w./ -]*$/;
const SPECIAL = /^(true|false|null|yes|no|on|off|~)$/i;

/**
 * @param {unknown} value
 * @returns {Line[]}
 */
export function lines(value) {
  return inside(value, 0);
}

/** @param {unknown} value @param {number} indent @returns {Line[]} */
function inside(value, indent) {
  if (Array.isArray(value)) return value.flatMap((entry) => listEntry(entry, indent));
  if (value !== null && typeof value === "object") {
    return Object.entries(value).flatMap(([key, entry]) => mappingEntry(key, entry, indent));
  }
  return [{ indent, key: null, ...scalar(value), item: false }];
}

/** @param {string} key @param {unknown} value @param {number} indent @returns {Line[]} */
function mappingEntry(key, value, indent) {
  const shown = quoted(key);
  if (isScalar(value)) return [{ indent, key: shown, ...scalar(value), item: false }];
  if (isEmpty(value)) return [{ indent, key: shown, value: Array.isArray(value) ? "[]" : "{}", kind: "word", item: false }];
  const flow = flowing(value);
  if (flow !== null) return [{ indent, key: shown, value: flow, kind: "number", item: false }];
  return [{ indent, key: shown, value: null, kind: "word", item: false }, ...inside(value, indent + 1)];
}

/** @param {unknown} value @param {number} indent @returns {Line[]} */
function listEntry(value, indent) {
  if (isScalar(value)) return [{ indent, key: null, ...scalar(value), item: true }];
  if (isEmpty(value)) return [{ indent, key: null, value: Array.isArray(value) ? "[]" : "{}", kind: "word", item: true }];
  const flow = flowing(value);
  if (flow !== null) return [{ indent, key: null, value: flow, kind: "number", item: true }];
  const [first, ...rest] = inside(value, indent + 1);
  return first ? [{ ...first, indent, item: true }, ...rest] : [];
}

/** @param {unknown} value */
const isScalar = (value) => value === null || typeof value !== "object";

/** @param {unknown} value */
const isEmpty = (value) => Object.keys(/** @type {object} */ (value)).length === 0;

/** Short lists of scalars stay on one line. @param {unknown} value */
function flowing(value) {
  if (!Array.isArray(value) || !value.every(isScalar)) return null;
  const text = `[${value.map((entry) => scalar(entry).value).join(", ")}]`;
  return text.length <= 72 ? text : null;
}

/** @param {unknown} value @returns {{value: string, kind: Line["kind"]}} */
function scalar(value) {
  if (typeof value === "number") return { value: String(value), kind: "number" };
  if (typeof value === "string") return { value: quoted(value), kind: "text" };
  return { value: value === undefined ? "null" : String(value), kind: "word" };
}

/** @param {string} text */
const quoted = (text) => (PLAIN.test(text) && !SPECIAL.test(text) && text.trim() === text ? text : JSON.stringify(text).replace(BREAKS, escaped));

/** What JSON has as it is, and YAML takes for a line's end or a mark, or refuses. */
const BREAKS = /[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]/g;
/** @param {string} letter */
const escaped = (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`;

/**
 * The lines as text that reads back as the same YAML.
 * @param {Line[]} all
 */
export const text = (all) =>
  all
    .map((line) => "  ".repeat(line.indent) + (line.item ? "- " : "") + (line.key === null ? "" : `${line.key}:`) +
      (line.key !== null && line.value !== null ? " " : "") + (line.value ?? ""))
    .join("\n")
    .concat("\n");
