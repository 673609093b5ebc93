/** Key figures of a finished job: the plain numbers and words of its result. */

import { duration, number, percent } from "../lib/format.js";
import { fill, h } from "../ui/dom.js";
import { Section } from "./section.js";

/** @type {Record<string, (value: number) => string>} */
const FORMATS = { seconds: duration, wall_seconds: duration, clean_accuracy: share, certified_accuracy: share, accuracy: share, eval_accuracy: share, test_accuracy: share, mfu: share };

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
    fill(this.list, ...figures.map(([name, value]) =>
      h("div", {}, h("dt", {}, name.replaceAll("_", " ").replaceAll(".", " · ")), h("dd", {}, shown(name, value)))));
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
  const format = FORMATS[name.split(".").at(-1) ?? ""];
  return format ? format(value) : number(Number(value.toPrecision(4)), 4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** @param {number} value */
function share(value) {
  return percent(value, 1);
}
