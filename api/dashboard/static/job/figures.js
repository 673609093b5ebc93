/** Key figures of a finished job: the plain numbers and words of its result. */

import { duration, number, percent } from "../lib/format.js";
import { fill, h } from "../ui/dom.js";
import { Section } from "./section.js";

/** Numbers that were written this short are shown as they were written. */
const SHORT = 5;
/** Letters of what is no figure but a sentence. */
const WORDS = 24;

/** Maps, since the names come from a job: an object would answer to `constructor` too. */
const NAMES = new Map([["seconds", "time"], ["wall_seconds", "wall time"], ["memory_gib", "memory (GiB)"]]);

/** @type {Map<string, (value: number) => string>} */
const FORMATS = new Map([
  ...["seconds", "wall_seconds"].map((name) => /** @type {const} */ ([name, duration])),
  ...["accuracy", "eval_accuracy", "clean_accuracy", "certified_accuracy", "eval_certified_accuracy", "mfu", "bubble_fraction",
    "data_wait_fraction"].map((name) => /** @type {const} */ ([name, share])),
]);

export class Figures extends Section {
  /** @param {readonly string[]} skip entries that another section shows */
  constructor(skip = []) {
    super("Result", "result");
    this.skip = skip;
    this.list = h("dl", { class: "figures" });
    this.body.append(this.list);
    this.element.hidden = true;
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    const figures = flat(kept(job.result ?? {}, this.skip)).filter(([, value]) => value !== false);
    this.element.hidden = figures.length === 0;
    const isWords = (/** @type {unknown} */ value) => typeof value === "string" && value.length > WORDS;
    const ordered = [...figures.filter(([, value]) => !isWords(value)), ...figures.filter(([, value]) => isWords(value))];
    fill(this.list, ...ordered.map(([name, value]) =>
      h("div", { class: isWords(value) ? "words" : null }, h("dt", {}, (NAMES.get(name) ?? name).replaceAll("_", " ").replaceAll(".", " · ")), h("dd", {}, shown(name, value)))));
  }
}

/** @param {Record<string, unknown>} result @param {readonly string[]} skip */
const kept = (result, skip) => Object.fromEntries(Object.entries(result).filter(([name]) => !skip.includes(name)));

/**
 * Scalars of a result, nested ones under dotted names.
 * @param {Record<string, unknown>} result
 * @param {string} [prefix]
 * @returns {[string, unknown][]}
 */
function flat(result, prefix = "") {
  return Object.entries(result).flatMap(([key, value]) => {
    if (value === null || Array.isArray(value)) return [];
    if (typeof value === "object") return flat(/** @type {Record<string, unknown>} */ (value), `${prefix}${key}.`);
    return [/** @type {[string, unknown]} */ ([prefix + key, value])];
  });
}

/** @param {string} name @param {unknown} value */
function shown(name, value) {
  if (typeof value !== "number") return String(value);
  const format = FORMATS.get(name.split(".").at(-1) ?? "");
  if (format) return format(value);
  return String(value).length <= SHORT && !Number.isInteger(value) ? String(value) : number(value);
}

/** @param {number} value */
function share(value) {
  return percent(value, 1);
}
