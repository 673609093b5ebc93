/** What each rank did in a step: spans as they arrive, and the rows that show them. Pure. */

import { duration } from "./format.js";

/** @typedef {import("./gantt.js").Cell} Cell */
/** @typedef {import("./gantt.js").Row} Row */
/** @typedef {{rank: number | null, name: string, start: number, end: number, detail?: Record<string, any>}} Span */
/** @typedef {Map<number, Map<string, Span>>} Steps spans by what tells them apart, by step */

/** The first span of a step on each rank. */
const FIRST = "data";
/** The part of a step that a pipeline's instructions fill. */
const HOLDS = "forward_backward";
/** What may follow a step and last longer than it. */
const AFTERWARDS = new Set(["checkpoint", "evaluate"]);
const LETTERS = new Map([["forward", "F"], ["backward", "B"], ["backward_input", "B"], ["backward_weight", "W"]]);
/** Steps whose spans are kept; those of older ones can be fetched. */
export const KEPT = 32;

/**
 * Adds a span to its step. A rank that begins a step anew (an attempt was resumed) loses what it had of it; the same
 * span twice is taken once.
 * @param {Steps} steps
 * @param {Span} span
 * @returns {number | null} the step; null of a span that belongs to none
 */
export function take(steps, span) {
  const step = span.detail?.step;
  if (!Number.isInteger(step)) return null;
  const spans = steps.get(step) ?? new Map();
  if (span.name === FIRST) {
    for (const [key, one] of spans) if (one.rank === span.rank && one.start < span.start) spans.delete(key);
  }
  spans.set(`${span.rank} ${span.name} ${span.start}`, span);
  steps.set(step, spans);
  if (steps.size > KEPT) steps.delete(Math.min(...steps.keys()));
  return step;
}

/** Whether a span is one instruction of a pipeline. @param {Span} span */
const isInstruction = (span) => span.detail?.micro_batch !== undefined;

/**
 * A row per rank: the parts of its step, and below them its pipeline's instructions where it has one. Times are in
 * seconds from the first start on.
 * @param {readonly Span[]} spans of one step
 * @param {number} ranks of the pipeline; every other stage of a rank is drawn softer
 * @returns {Row[]}
 */
export function rows(spans, ranks) {
  const origin = Math.min(...spans.map((span) => span.start));
  const pipelined = spans.some(isInstruction);
  return [...new Set(spans.map((span) => span.rank))].sort((a, b) => Number(a) - Number(b)).map((rank) => {
    const own = spans.filter((span) => span.rank === rank).sort((a, b) => a.start - b.start);
    const parts = own.filter((span) => !isInstruction(span)).map((span) => part(span, origin, pipelined));
    const instructions = own.filter(isInstruction).map((span) => instruction(span, origin, ranks));
    return { label: rank === null ? "–" : `rank ${rank}`, lanes: pipelined ? [parts, instructions] : [parts] };
  });
}

/** What holds a pipeline's instructions is only hinted at. @param {Span} span @param {number} origin @param {boolean} pipelined @returns {Cell} */
function part(span, origin, pipelined) {
  const soft = pipelined && span.name === HOLDS;
  const name = span.name.replaceAll("_", " ");
  return { ...times(span, origin), tone: span.name, text: name, words: sentence(span, [name]), group: null, soft };
}

/** @param {Span} span @param {number} origin @param {number} ranks @returns {Cell} */
function instruction(span, origin, ranks) {
  const { op = span.name, stage, micro_batch: micro } = span.detail ?? {};
  const words = sentence(span, [String(op).replaceAll("_", " "), `stage ${stage}`, `micro-batch ${micro}`]);
  return { ...times(span, origin), tone: String(op), text: label(op, micro), words, group: micro, soft: isSoft(stage, ranks) };
}

/** What fits into the cell of an instruction. @param {string} op @param {number} micro */
export const label = (op, micro) => (LETTERS.has(op) ? `${LETTERS.get(op)}${micro}` : "");

/** @param {number} stage @param {number} ranks */
export const isSoft = (stage, ranks) => Math.floor(stage / Math.max(ranks, 1)) % 2 === 1;

/** @param {Span} span @param {number} origin */
const times = (span, origin) => ({ start: span.start - origin, end: span.end - origin });

/** @param {Span} span @param {string[]} words */
const sentence = (span, words) => [`rank ${span.rank}`, ...words, precise(span.end - span.start)].join(" · ");

/**
 * A duration that may be far below a second: `1.234 ms`, `85 µs`.
 * @param {number} seconds
 */
export function precise(seconds) {
  if (seconds >= 10) return duration(seconds);
  if (seconds >= 1) return `${seconds.toFixed(2)}\u202fs`;
  if (seconds >= 0.9995e-3) return `${Number((seconds * 1e3).toPrecision(3))}\u202fms`;
  return `${Math.round(seconds * 1e6)}\u202fµs`;
}

/** Whether a cell is part of the step itself. @param {Cell} cell */
export const inStep = (cell) => !AFTERWARDS.has(cell.tone);

/**
 * The kinds of work in rows, by first sight.
 * @param {readonly Row[]} all
 */
export const tonesOf = (all) => [...new Set(all.flatMap((row) => row.lanes.flat().map((cell) => cell.tone)))]
  .filter((tone) => tone !== HOLDS || all.every((row) => row.lanes.length === 1));
