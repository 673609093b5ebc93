/** Log lines: kept once, in order, and only so many. Pure. */

import { plain } from "./format.js";

/** @typedef {{key: string, time: number, rank: number | null, stream: string, text: string}} LogLine */

export const KEEP = 4000;

/**
 * A log event as a line that can be shown.
 * @param {import("./types.js").JobEvent} event
 * @returns {LogLine}
 */
export function fromEvent(event) {
  const text = plain(String(event.line ?? ""));
  const rank = event.rank ?? null;
  return { key: `${event.time}|${rank}|${text}`, time: event.time, rank, stream: String(event.stream ?? "stdout"), text };
}

/** What is kept of a log. A line of the snapshot that the stream repeats is kept once. */
export class LogStore {
  /**
   * @param {readonly LogLine[]} [snapshot]
   * @param {readonly (number | null)[]} [known] ranks that wrote something, also where the snapshot has none of it
   */
  constructor(snapshot = [], known = []) {
    this.known = known;
    this.lines = [...snapshot];
    this.dropped = 0;
    /** @type {Map<string, number>} how often the stream may still repeat each line of the snapshot */
    this.repeats = new Map();
    for (const { key } of snapshot) this.repeats.set(key, (this.repeats.get(key) ?? 0) + 1);
  }

  /**
   * @param {LogLine} line from the stream
   * @returns {boolean} whether it is new
   */
  add(line) {
    const repeats = this.repeats.get(line.key) ?? 0;
    if (repeats > 0) {
      this.repeats.set(line.key, repeats - 1);
      return false;
    }
    this.lines.push(line);
    if (this.lines.length > KEEP) this.trim();
    return true;
  }

  trim() {
    this.dropped += this.lines.splice(0, this.lines.length - KEEP + KEEP / 4).length;
  }

  /** The ranks that wrote something, ascending; the service's own lines are rank null. */
  ranks() {
    const found = [...new Set([...this.known, ...this.lines.map((line) => line.rank)])];
    return found.sort((a, b) => (a ?? -1) - (b ?? -1));
  }
}

/**
 * Whether a line holds a text, in any case.
 * @param {LogLine} line
 * @param {string} text
 */
export const hasText = (line, text) => line.text.toLowerCase().includes(text.toLowerCase());

/** What lines of a level speak of, as the service tells it (service/jobs/events/levels.py). @type {ReadonlyMap<string, RegExp>} */
const LEVELS = new Map([
  ["error", /\b(\w*error|\w*exception|critical|fatal|traceback)\b/i],
  ["warning", /\b(\w*warn(ing)?s?|\w*error|\w*exception|critical|fatal|traceback)\b/i],
]);

/**
 * Whether a line speaks of something as bad as a level, or worse; every line does where no level is asked for.
 * @param {LogLine} line
 * @param {string} level
 */
export const isAtLeast = (line, level) => LEVELS.get(level)?.test(line.text) ?? true;

/**
 * The line that names the cause: the end of the last traceback, of a rank if one is named; where that end is missing, its
 * beginning; null where nothing broke in these lines.
 * @param {readonly LogLine[]} lines @param {number | null} [rank]
 */
export function breaking(lines, rank = null) {
  const begins = (/** @type {LogLine} */ line) => line.text.startsWith("Traceback (most recent call last)");
  const of = (/** @type {(line: LogLine) => boolean} */ wanted) => lines.findLastIndex((line) => begins(line) && wanted(line));
  const own = rank === null ? -1 : of((line) => line.rank === rank);
  const found = own >= 0 ? own : of(() => true);
  const first = lines[found];
  if (!first) return null;
  return lines.slice(found + 1).find((line) => line.rank === first.rank && line.stream === first.stream && /^\S/.test(line.text)) ?? first;
}

/**
 * The query for the newest lines with a text that pass the filter.
 * @param {string} text
 * @param {string} filter
 * @param {string} level empty for every one
 * @param {number} tail
 */
export function logQuery(text, filter, level, tail) {
  const query = new URLSearchParams({ format: "jsonl", tail: String(tail) });
  if (text !== "") query.set("q", text);
  if (level !== "") query.set("level", level);
  if (filter === "service") query.set("stream", "service");
  else if (filter !== "all") query.set("rank", filter);
  return query.toString();
}

/**
 * Whether a line passes the filter: `all`, `service`, or a rank as text.
 * @param {LogLine} line
 * @param {string} filter
 */
export const passes = (line, filter) =>
  filter === "all" || (filter === "service" ? line.stream === "service" : String(line.rank) === filter);
