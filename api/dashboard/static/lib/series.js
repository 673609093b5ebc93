/** Metric series that grow while a job runs. Pure. */

import { decimate, lowerBound } from "./decimate.js";

/** @typedef {{step: number[], time: number[], value: number[]}} Series */

export const CAP = 24_000;
/** A series longer than the cap is thinned to about a third of it, keeping extremes. */
const THINNED_COLUMNS = CAP / 12;

/**
 * Adds a point. A step at or before the last one means that an attempt was resumed there: what came after it is
 * replaced, as the model's history is. So replaying events that a snapshot already holds changes nothing.
 * @param {Series} series
 * @param {number} step
 * @param {number} time
 * @param {number} value
 */
export function append(series, step, time, value) {
  const last = series.step.at(-1);
  if (last !== undefined && step <= last) {
    const keep = lowerBound(series.step, step);
    series.step.length = keep;
    series.time.length = keep;
    series.value.length = keep;
  }
  series.step.push(step);
  series.time.push(time);
  series.value.push(value);
  if (series.step.length > CAP) thin(series);
}

/** @param {Series} series */
function thin(series) {
  const first = /** @type {number} */ (series.step[0]);
  const last = /** @type {number} */ (series.step.at(-1));
  const times = new Map(series.step.map((step, index) => [step, series.time[index] ?? Number.NaN]));
  const kept = decimate(series.step, series.value, first, last, THINNED_COLUMNS);
  series.step = kept.x;
  series.value = kept.y;
  series.time = kept.x.map((step) => times.get(step) ?? Number.NaN);
}

/**
 * Takes one `metric` event into a table of series; returns the names that it touched.
 * @param {Map<string, Series>} table
 * @param {import("./types.js").JobEvent} event
 */
export function take(table, event) {
  const names = Object.keys(event.values ?? {});
  for (const name of names) {
    let series = table.get(name);
    if (!series) {
      series = { step: [], time: [], value: [] };
      table.set(name, series);
    }
    append(series, event.step, event.time, numeric(event.values[name]));
  }
  return names;
}

/**
 * The API's answer to a metrics call as a table of series.
 * @param {{series?: Record<string, {step: number[], time: number[], value: (number | string | null)[]}>}} answer
 * @returns {Map<string, Series>}
 */
export function table(answer) {
  return new Map(
    Object.entries(answer.series ?? {}).map(([name, series]) => [
      name,
      { step: [...series.step], time: [...(series.time ?? [])], value: series.value.map(numeric) },
    ]),
  );
}

/** @param {unknown} value JSON has no NaN: such a value arrives as null or as a word */
const numeric = (value) => (typeof value === "number" ? value : Number.NaN);

/**
 * An exponential moving average that begins at the first value; what is not finite stays a gap.
 * @param {readonly number[]} values
 * @param {number} weight of what came before, from 0 to less than 1
 */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

/** Metrics of which less is better, and those of which more is. */
const LESS = new Set(["loss", "perplexity"]);
const MORE = new Set(["accuracy", "certified_accuracy"]);

/** Whether a metric is measured now and then, on data that the model does not learn from. @param {string} name */
export const isEvaluation = (name) => name.startsWith("eval_");

/**
 * Where a metric was best; null where neither more nor less of it is, or where there is nothing yet.
 * @param {string} name @param {readonly number[]} value
 */
export function best(name, value) {
  const bare = name.replace(/^(eval|train)_/, "");
  const sign = LESS.has(bare) ? -1 : MORE.has(bare) ? 1 : 0;
  let found = null;
  for (const [index, one] of sign ? value.entries() : []) {
    if (Number.isFinite(one) && (found === null || sign * one > sign * (value[found] ?? Number.NaN))) found = index;
  }
  return found;
}

/**
 * What a metric of one device is about, such as `device_busy.3`; null for others.
 * @param {string} name
 */
export function ofDevice(name) {
  const found = /^(device_\w+)\.(\d+)$/.exec(name);
  return found ? { key: found[1] ?? "", rank: Number(found[2]) } : null;
}

/**
 * What a metric with labels counts, such as `calls/stage 0/train/8x64`; null for others.
 * @param {string} name
 */
export function ofLabels(name) {
  const cut = name.indexOf("/");
  return cut < 0 ? null : { key: name.slice(0, cut), label: name.slice(cut + 1).replaceAll("/", " · ") };
}

/** The unit of shares of one, which are shown as percent. */
export const PERCENT = "%";

/**
 * @typedef {object} Panel one chart: series that share a meaning and a unit
 * @property {string} key
 * @property {string} title
 * @property {string} unit
 * @property {boolean} log whether a logarithmic axis is the better start
 * @property {string[]} names
 */

/** @type {Record<string, [title: string, unit: string]>} */
const KNOWN = {
  loss: ["Loss", ""],
  accuracy: ["Accuracy", PERCENT],
  perplexity: ["Perplexity", ""],
  grad_norm: ["Gradient norm", ""],
  lr: ["Learning rate", ""],
  tokens_per_s: ["Throughput", "tokens/s"],
  samples_per_s: ["Throughput", "samples/s"],
  step_ms: ["Step time", "ms"],
  waiting: ["Time spent waiting", PERCENT],
  mfu: ["Model FLOPs utilisation", PERCENT],
  tflops: ["Compute", "TFLOP/s per device"],
  memory_gib: ["Peak memory", "GiB per device"],
  device_busy: ["Utilisation", PERCENT],
  device_memory_gib: ["Memory", "GiB by rank"],
  device_power_w: ["Power", "W by rank"],
  calls: ["Calls of modules", "in a watched step or an evaluation"],
  forwards_per_micro_batch: ["Forwards for each micro-batch", ""],
  reentries: ["Calls within a backward", "in a watched step"],
  outliving_results: ["Results that outlive their step", "of a watched step"],
};
const ORDER = Object.keys(KNOWN);
/** Metrics that share a panel with others. */
const TOGETHER = new Map([
  ["certified_accuracy", "accuracy"], ["bubble_fraction", "waiting"], ["data_wait_fraction", "waiting"],
]);

/**
 * Sorts metric names into panels: `loss` with `eval_loss`, the well-known first, the rest by name.
 * @param {Iterable<string>} names
 * @returns {Panel[]}
 */
export function panels(names) {
  /** @type {Map<string, Panel>} */
  const found = new Map();
  for (const name of [...names].sort()) {
    const bare = (ofDevice(name) ?? ofLabels(name))?.key ?? name.replace(/^(eval|train)_/, "");
    const key = TOGETHER.get(bare) ?? bare;
    const [title, unit] = Object.hasOwn(KNOWN, key) ? (KNOWN[key] ?? [key, ""]) : [words(key), ""];
    const panel = found.get(key) ?? { key, title, unit, log: false, names: [] };
    panel.names.push(name);
    panel.names.sort((a, b) => a.length - b.length || a.localeCompare(b));
    found.set(key, panel);
  }
  return [...found.values()].sort((a, b) => rank(a.key) - rank(b.key) || a.key.localeCompare(b.key));
}

/** @param {string} key */
const rank = (key) => (ORDER.includes(key) ? ORDER.indexOf(key) : ORDER.length);

/** @param {string} key */
function words(key) {
  const text = key.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
