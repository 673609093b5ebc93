/** A compile report as the page shows it. What was not measured is null there, and a dash here. Pure. */

import { number } from "./format.js";

/** @typedef {Record<string, any>} Rung one rung in one phase */
/** @typedef {{kind: string, name: string, iteration: number, max_abs: number | null, ratio: number | null, excess: number | null}} Comparison */

const TONES = new Map([["pass", "passed"], ["not_reached", "skipped"], ["not_applicable", "skipped"], ["unstable", "unknown"], ["frozen", "frozen"], ["vacuous", "vacuous"]]);

/**
 * The word of the few that the page has colours for.
 * @param {Rung} rung
 */
export const tone = (rung) => TONES.get(String(rung.verdict)) ?? "failed";

/**
 * What a rung is called. The first is named after its backend, which runs graphs as they are: not what steps are
 * compared with, which Dynamo never saw.
 * @param {unknown} rung
 */
export const title = (rung) => (rung === "eager" ? "eager (Dynamo)" : String(rung));

/** @typedef {Map<string, import("./spans.js").Span>} Climb the rungs that have ended, by `phase/rung` */

/**
 * Adds the span of a rung to a climb; any other span is none of it. A rung that is climbed again, by a later attempt,
 * begins the climb anew; the same span twice is taken once.
 * @param {Climb} climb
 * @param {import("./spans.js").Span} span
 */
export function climbed(climb, span) {
  if (typeof span.detail?.verdict !== "string" || span.name.split("/").length !== 2) return;
  if (climb.has(span.name) && climb.get(span.name)?.start !== span.start) climb.clear();
  climb.set(span.name, span);
}

/**
 * The ladder as far as it is known before there is a report: a row per phase and rung, in the order of the climb. The
 * first rung without a span is the one that is tried, while the job ``climbs``.
 * @param {Climb} climb
 * @param {{phases?: string[], modes?: string[]}} spec
 * @param {boolean} climbs
 * @returns {{rung: string, phase: string, verdict: string | null, seconds: number | null, isTried: boolean}[]}
 */
export function provisional(climb, { phases = [], modes = [] }, climbs) {
  const rows = phases.flatMap((phase) => modes.map((rung) => {
    const span = climb.get(`${phase}/${rung}`);
    return { rung, phase, verdict: span?.detail?.verdict ?? null, seconds: span ? span.end - span.start : null, isTried: false };
  }));
  const next = rows.find((row) => row.verdict === null);
  return climbs ? rows.map((row) => ({ ...row, isTried: row === next })) : rows;
}

/**
 * In a few words what a rung brings, from a gate's worth of it.
 * @param {Record<string, any>} worth
 */
export function payoff({ worth_it: wins, noisy, break_even_steps: steps }) {
  const doubt = noisy ? " (noisy timing)" : "";
  if (wins) return (typeof steps === "number" ? `pays after ${number(steps)} steps` : "faster than eager") + doubt;
  return noisy ? "too noisy to tell whether it pays" : "never pays";
}

/** What the cards of the phases tell already: that all rungs passed, and what compiling is worth. */
const TOLD = /: all \d+ rungs passed\.$|^(It is (not )?worth it|Whether it is worth it|The gain is unclear|What compiling)\b/;

/**
 * The sentences of a report's summary that say more than its cards.
 * @param {string[]} summary
 */
export const more = (summary) => summary.filter((sentence) => !TOLD.test(sentence));

/**
 * The worst comparison of each kind with eager, then those that failed and are not among them.
 * @param {Rung} rung
 * @returns {Comparison[]}
 */
export function comparisons(rung) {
  const worst = Object.values(rung.parity?.worst ?? {});
  const same = (/** @type {Comparison} */ a, /** @type {Comparison} */ b) =>
    a.kind === b.kind && a.name === b.name && a.iteration === b.iteration;
  const failed = (rung.parity?.failed ?? []).filter((/** @type {Comparison} */ one) => !worst.some((other) => same(one, other)));
  return [...worst, ...failed];
}

/**
 * How far the rung is from eager, at its worst; null when nothing was compared.
 * @param {Rung} rung
 */
export function largestError(rung) {
  const found = comparisons(rung).flatMap((one) => (typeof one.max_abs === "number" ? [one.max_abs] : []));
  return found.length ? Math.max(...found) : null;
}

/**
 * How often something was found: entries count for as many as they say. Null when it was not looked for.
 * @param {{count?: number}[] | null | undefined} list
 */
export const tally = (list) => (Array.isArray(list) ? list.reduce((sum, { count = 1 }) => sum + count, 0) : null);

/**
 * Named numbers and words of a part of a report, nested ones under dotted names.
 * @param {unknown} part
 * @param {string} [prefix]
 * @returns {[string, string][]}
 */
export function entries(part, prefix = "") {
  if (part === null || part === undefined) return [];
  if (typeof part !== "object") return [[prefix || "value", typeof part === "number" ? number(part, 4) : String(part)]];
  if (Array.isArray(part) && part.length === 0) return [];
  if (Array.isArray(part) && part.every((entry) => typeof entry !== "object")) return [[prefix, part.join(", ")]];
  return Object.entries(part).flatMap(([key, value]) => entries(value, prefix ? `${prefix}.${key}` : key));
}

/**
 * Where a graph break or a recompilation happened: `model.py:118 in forward`.
 * @param {{file?: string, line?: number, function?: string}} entry
 */
export function place({ file, line, function: inside }) {
  const where = [file, line].filter(Boolean).join(":");
  return [where, inside && `in ${inside}`].filter(Boolean).join(" ");
}

/**
 * The rung that a phase may be compiled with.
 * @param {Rung[]} rungs of one phase
 * @param {string | null} allowed
 */
export const fastest = (rungs, allowed) => rungs.find((rung) => rung.rung === allowed) ?? null;

/**
 * The rung that a training job runs in: the lowest of those that a gate allows for the phases that are asked for, one
 * for all. Null where any of them is not allowed.
 * @param {Record<string, any> | null | undefined} gate
 * @param {string[]} phases
 * @param {string[]} ladder
 * @returns {string | null}
 */
export function opened(gate, phases, ladder) {
  const places = phases.map((phase) => ladder.indexOf(gate?.[phase]));
  return places.includes(-1) ? null : (ladder[Math.min(...places)] ?? null);
}

/**
 * The highest rung of a phase whose calls were seen; its rehearsal where it could only be rehearsed.
 * @param {Rung[]} rungs
 * @param {string} phase
 */
export const furthest = (rungs, phase) =>
  rungs.filter((rung) => rung.phase === phase).map((rung) => (rung.invocations ? rung : rung.rehearsal)).filter(Boolean).at(-1) ?? null;

/** @param {Rung | null} rung @returns {Record<string, any>[]} */
export const invocations = (rung) => rung?.invocations ?? [];

/**
 * Results that outlived their step, with the rung where that was seen; each place once.
 * @param {Rung[]} rungs
 */
export function held(rungs) {
  const all = rungs.flatMap((rung) => (rung.lifetimes ?? rung.rehearsal?.lifetimes ?? []).map((/** @type {any} */ one) => ({ rung, one })));
  const seen = new Set();
  return all.filter(({ rung, one }) => {
    const key = JSON.stringify([rung.phase, rung.rung, one.module, one.shape, one.holders, one.site]);
    return !seen.has(key) && seen.add(key);
  });
}
