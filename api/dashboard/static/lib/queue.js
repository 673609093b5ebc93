/** A waiting job's turn, as people read it. Pure: the present time is an argument. */

import { duration } from "./format.js";

const BASES = {
  durations: "how long earlier jobs of the kind took",
  limits: "time limits",
  progress: "the progress of running jobs",
};

/**
 * @param {import("./types.js").QueueLine | null} line
 * @param {number} now in milliseconds
 */
export function turn(line, now) {
  if (!line || line.place === null) return "";
  const place = line.place === 1 ? "next in the queue" : `number ${line.place} in the queue`;
  return `${place}; ${expected(line.start, now)}`;
}

/** When a job may start. @param {import("./types.js").StartEstimate | null} start @param {number} now in milliseconds */
export function expected(start, now) {
  if (!start) return "start unknown";
  if (!start.rests_on.length) return "it fits now";
  const seconds = Math.max((Date.parse(start.at) - now) / 1000, 0);
  return `may start in ${duration(seconds)}, by ${start.rests_on.map((basis) => BASES[basis]).join(" and ")}`;
}

/**
 * A waiting job's place and what it waits for, in a list, which says elsewhere that it is queued.
 * @param {import("./types.js").QueueLine | undefined} line
 * @param {string} reason
 */
export const placed = (line, reason) => (line?.place ? [`no. ${line.place}`, reason].filter(Boolean).join(" · ") : reason);
