/** The attempts of a job, as its changes of state tell them. Pure. */

import { isTerminal } from "./state.js";

/**
 * @typedef {object} Attempt
 * @property {number} number
 * @property {number} began Unix seconds
 * @property {number | null} ended null while it goes on
 * @property {string} how the state that it left the job in
 * @property {string} why
 * @property {[number, number] | null} steps the first and the last that it reported
 */

/**
 * @param {readonly import("./types.js").JobEvent[]} changes of state, in order
 * @param {{step: readonly number[], time: readonly number[]} | null} [series] what was reported, and when
 * @returns {Attempt[]}
 */
export function attempts(changes, series = null) {
  /** @type {Attempt[]} */
  const found = [];
  for (const { state, attempt, time, reason } of changes) {
    const last = found.at(-1);
    if (state === "starting") found.push({ number: attempt, began: time, ended: null, how: state, why: "", steps: null });
    else if (last && last.ended === null) {
      const isOver = isTerminal(state) || state === "queued";
      Object.assign(last, { how: state, why: reason ?? "", ended: isOver ? time : null });
    }
  }
  return found.map((one) => ({ ...one, steps: series && reached(one, series) }));
}

/** @param {Attempt} one @param {{step: readonly number[], time: readonly number[]}} series @returns {[number, number] | null} */
function reached({ began, ended }, { step, time }) {
  const own = step.filter((_, index) => (time[index] ?? 0) >= began && (time[index] ?? 0) <= (ended ?? Number.POSITIVE_INFINITY));
  return own.length ? [Math.min(...own), Math.max(...own)] : null;
}
