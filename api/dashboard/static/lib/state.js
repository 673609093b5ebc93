/** The states of a job as the dashboard treats them, and how events change what it shows. Pure. */

import { duration, number } from "./format.js";

/** @typedef {import("./types.js").Job} Job */
/** @typedef {import("./types.js").JobEvent} JobEvent */
/** @typedef {import("./types.js").Progress} Progress */

export const STATES = ["queued", "starting", "running", "cancelling", "succeeded", "failed", "cancelled"];
/** A time of the record is that of its event, but for its last digits. */
const SAME_S = 0.01;
const TERMINAL = new Set(["succeeded", "failed", "cancelled"]);

/** @param {string} state */
export const isTerminal = (state) => TERMINAL.has(state);

/** @param {string} state */
export const canCancel = (state) => !isTerminal(state) && state !== "cancelling";

/** @param {Job} job that failed and would fail alike has nothing to retry */
export const canRetry = ({ state, error }) => state === "cancelled" || (state === "failed" && !error?.final);

/**
 * The job after an event; the same object when the event says nothing about it.
 * @param {Job} job
 * @param {JobEvent} event
 * @returns {Job}
 */
export function reduce(job, event) {
  if (event.type === "progress") {
    const { done, total, unit, share, phase, left_s } = event;
    return { ...job, progress: { done, total, unit, share, phase, left_s } };
  }
  if (event.type === "phase") return event.rank === 0 ? { ...job, phases: entered(job.phases ?? [], event) } : job;
  if (event.type === "state") {
    if (typeof event.attempt === "number" && event.attempt < job.attempt) return job;
    return { ...job, state: event.state, attempt: event.attempt ?? job.attempt, reason: event.reason ?? null };
  }
  return job;
}

/**
 * The phases, once the job has begun with one more: until then the last one went on. One that is told again is known.
 * @param {import("./types.js").Phase[]} phases
 * @param {JobEvent} event
 */
function entered(phases, { name, time }) {
  if (phases.some((phase) => phase.name === name && Math.abs(began(phase) - time) < SAME_S)) return phases;
  const known = phases.map((phase) => (phase.seconds === null ? { ...phase, seconds: lasted(phase, time) } : phase));
  return [...known, { name, began_at: new Date(time * 1000).toISOString(), seconds: null }];
}

/**
 * Seconds for which a phase lasted, or has lasted.
 * @param {import("./types.js").Phase} phase
 * @param {number} now Unix seconds
 */
export const lasted = (phase, now) => phase.seconds ?? Math.max(now - began(phase), 0);

/** @param {import("./types.js").Phase} phase */
const began = (phase) => Date.parse(phase.began_at) / 1000;

/**
 * The part of the work that is done, between 0 and 1; null when there is nothing to divide.
 * @param {Job} job
 */
export function fraction(job) {
  if (!job.progress || !(job.progress.total > 0)) return null;
  if (typeof job.progress.share === "number") return Math.min(Math.max(job.progress.share, 0), 1);
  return Math.min(Math.max(job.progress.done / job.progress.total, 0), 1);
}

/**
 * The progress in words: what is done, what the job is doing, how long it is going to take.
 * @param {Progress} progress
 */
export function progressWords({ done, total, unit, phase, left_s }) {
  const left = typeof left_s === "number" ? `about ${duration(left_s)} left` : "";
  return [`${number(done)} of ${number(total)} ${unit}`, phase, left].filter(Boolean).join(", ");
}

/**
 * The fraction as whole percent, rounded down: an unfinished job is never at 100.
 * @param {number} part
 */
export const wholePercent = (part) => Math.floor(part * 100 + 1e-9);

/** When the job began; the parent of others is never placed, and runs from its submission. @param {Job} job */
export const begun = (job) => job.started_at ?? (job.children ? job.created_at : null);

/**
 * Seconds that the job has run, or ran; null before it started.
 * @param {Job} job
 * @param {number} now Unix seconds
 */
export function ran(job, now) {
  const start = begun(job);
  if (!start) return null;
  const end = job.ended_at ? Date.parse(job.ended_at) / 1000 : isTerminal(job.state) ? null : now;
  return end === null ? null : Math.max(end - Date.parse(start) / 1000, 0);
}

/**
 * Ids of other jobs that this one needs, with the reason.
 * @param {Job} job
 * @returns {{id: string, why: string}[]}
 */
export function dependencies(job) {
  /** @type {Map<string, string>} */
  const found = new Map();
  const spec = job.spec ?? {};
  if (spec.model?.job) found.set(spec.model.job, "model");
  if (spec.weights?.job) found.set(spec.weights.job, "weights");
  if (spec.compile?.gate) found.set(spec.compile.gate, "compile gate");
  for (const id of spec.after ?? []) if (!found.has(id)) found.set(id, "runs after");
  return [...found].map(([id, why]) => ({ id, why }));
}

/**
 * What the job is called: its name, or its kind where it has none.
 * @param {Job} job
 */
export const title = (job) => job.name || job.kind;
