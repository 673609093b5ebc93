/** What ran on a host's devices, and when. Pure: the present time is an argument. */

import { duration, unix } from "./format.js";
import { isTerminal, title } from "./state.js";

/** @typedef {import("./types.js").Job} Job */
/** @typedef {import("./gantt.js").Row} Row */

/**
 * A row for each device that a job had, with a cell for the last attempt of each job, in seconds before now.
 * @param {readonly Job[]} jobs @param {string} host @param {number} now
 * @returns {Row[]}
 */
export function rowsOf(jobs, host, now) {
  /** @type {Map<string, import("./gantt.js").Cell[]>} */
  const found = new Map();
  for (const job of jobs) {
    const start = unix(job.started_at);
    if (start === null) continue;
    const end = isTerminal(job.state) ? (unix(job.ended_at) ?? start) : now;
    const words = `${title(job)} · ${job.kind} · ${job.state} · ${duration(end - start)}, from ${duration(now - start)} ago`;
    const cell = { start: start - now, end: end - now, tone: job.kind, text: title(job), words, group: null };
    for (const share of job.placement.filter((one) => one.host === host)) {
      for (const device of share.devices) {
        const name = `${share.pool} ${device}`;
        found.set(name, [...(found.get(name) ?? []), cell]);
      }
    }
  }
  const inOrder = new Intl.Collator("en", { numeric: true });
  return [...found].sort(([one], [other]) => inOrder.compare(one, other))
    .map(([label, cells]) => ({ label, lanes: [cells.sort((one, other) => one.start - other.start)] }));
}
