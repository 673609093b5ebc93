/** What a project uses, and how much of it it may. Pure. */

import { bytes, duration, number } from "./format.js";

/** @typedef {{label: string, used: string, most: string, share: number | null}} QuotaLine */

/** @param {number} value */
const hours = (value) => `${number(value)} h`;

/** @type {[string, string, (value: number) => string][]} */
const USED = [
  ["queued_jobs", "Jobs that wait", number],
  ["devices", "Devices held", number],
  ["device_hours", "Device-hours", hours],
  ["upload_bytes", "Uploads", bytes],
  ["artifact_bytes", "Artifacts and events", bytes],
];
/** Quotas that bound each job alone. @type {[string, string, (value: number) => string][]} */
const EACH = [
  ["highest_priority", "Highest priority", number],
  ["longest_time_s", "Longest time limit", duration],
  ["default_time_s", "Time limit where none is given", duration],
];

/**
 * A line for each thing that has a quota, and for each bound of a job.
 * @param {Record<string, number | null>} quotas
 * @param {Record<string, number>} usage
 * @returns {QuotaLine[]}
 */
export function quotaLines(quotas, usage) {
  const used = USED.map(([name, label, words]) => {
    const most = quotas[name] ?? null;
    const held = usage[name] ?? 0;
    return { label, used: words(held), most: most === null ? "no limit" : words(most), share: most === null ? null : most > 0 ? Math.min(held / most, 1) : 1 };
  });
  const bounds = EACH.flatMap(([name, label, words]) => {
    const most = quotas[name] ?? null;
    return most === null ? [] : [{ label, used: "", most: words(most), share: null }];
  });
  return [...used, ...bounds];
}
