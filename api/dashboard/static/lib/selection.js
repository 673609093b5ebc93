/** What can be done to several jobs at once, and what came of it. Pure. */

import { many } from "./format.js";
import { canCancel, canRetry, isTerminal, title } from "./state.js";

/** @typedef {import("./types.js").Job} Job */

/**
 * @typedef {object} BulkAction
 * @property {string} name
 * @property {string} done its past participle
 * @property {(job: Job) => boolean} suits
 * @property {string} consequence
 */

/** @type {readonly BulkAction[]} */
export const ACTIONS = [
  {
    name: "Cancel",
    done: "cancelled",
    suits: ({ state }) => canCancel(state),
    consequence: "Queued jobs leave the queue; processes of running ones are asked to stop. Checkpoints and artifacts are kept.",
  },
  {
    name: "Retry",
    done: "queued again",
    suits: canRetry,
    consequence: "Each is queued as a new attempt, which resumes from its last checkpoint, if it has one.",
  },
  {
    name: "Delete",
    done: "deleted",
    suits: ({ state }) => isTerminal(state),
    consequence: "Their records, logs and artifacts are gone for good; of a sweep also its jobs.",
  },
];

/**
 * The selected jobs that an action leaves out for a reason that their state does not tell: they would fail again.
 * @param {BulkAction} action
 * @param {readonly Job[]} selected
 * @returns {{job: Job, why: string}[]}
 */
export function hopeless({ name }, selected) {
  const finals = name === "Retry" ? selected.filter(({ state, error }) => state === "failed" && error?.final) : [];
  return finals.map((job) => ({ job, why: `It would fail again: ${job.error?.message ?? ""}` }));
}

/**
 * The question before an action: how many jobs it is for, and how many it leaves alone.
 * @param {BulkAction} action
 * @param {number} suited
 * @param {number} selected
 */
export function question({ name, consequence }, suited, selected) {
  const rest = selected - suited;
  const others = rest > 0 ? ` ${many(rest, "other selected job")} ${rest === 1 ? "stays as it is" : "stay as they are"}.` : "";
  return { heading: `${name} ${many(suited, "job")}?`, detail: `${consequence}${others}` };
}

/**
 * @param {BulkAction} action
 * @param {{job: Job, why: string}[]} failures
 * @param {number} tried
 */
export function report({ done }, failures, tried) {
  if (failures.length === 0) return { heading: `${many(tried, "job")} ${done}`, lines: [] };
  return {
    heading: `${many(tried - failures.length, "job")} ${done}, ${failures.length} not`,
    lines: failures.map(({ job, why }) => ({ id: job.id, words: title(job), why })),
  };
}
