/** Whom the job's spec has told of what, and what came of it. */

import { clock, dateTime, number, unix } from "../lib/format.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h } from "../ui/dom.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {{id: string, state: string, attempts: number, status: number | null, error: string | null, last_at: string | null,
 *   next_at: string | null, event: {timestamp: string, data: {state: string, metric: {name: string, value: number, threshold: string} | null}}}} Notice */

/** How long after a change of state what it led to is asked for first, and how often while something is still to be sent. */
const SOON_MS = 1500;
const POLL_MS = 5000;

export class Notices extends Section {
  constructor() {
    super("Notices", "told");
    this.list = h("ol", { class: "changes" });
    this.body.append(this.list);
    /** @type {Job | null} */
    this.job = null;
    this.later = 0;
  }

  /** @param {Job} job */
  show(job) {
    this.element.hidden = !job.spec.notify;
    if (this.job && this.job.state !== job.state) this.soon(SOON_MS);
    this.job = job;
    if (job.spec.notify) this.remark(hostOf(job.spec.notify.webhook));
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type === "metric" && Object.keys(event.values).some((name) => name in (this.job?.spec.notify?.when ?? {})) && !this.later) {
      this.soon(SOON_MS);
    }
  }

  /** @param {Job} job */
  async fetch(job) {
    if (!job.spec.notify) return;
    const { items } = await call(jobPath(job.id, "/notices"));
    fill(this.list, ...(items.length ? items.map(row) : [h("li", { class: "muted" }, "Nothing was to be told so far")]));
    if (items.some((/** @type {Notice} */ each) => each.state === "pending")) this.soon(POLL_MS);
  }

  /** @param {number} delay */
  soon(delay) {
    window.clearTimeout(this.later);
    this.later = window.setTimeout(() => {
      this.later = 0;
      if (document.hidden) this.soon(POLL_MS);
      else if (this.job) void this.load(this.job);
    }, delay);
  }
}

/** @param {Notice} notice */
function row({ event, last_at: last, ...notice }) {
  const at = unix(last ?? event.timestamp) ?? 0;
  const { state, metric } = event.data;
  return h("li", { "data-notice": notice.state },
    h("strong", {}, metric ? `${metric.name} ${number(metric.value)}` : state), metric && h("span", { class: "muted" }, metric.threshold),
    h("time", { class: "muted", title: dateTime(at) }, clock(at)), h("p", {}, outcome(notice)));
}

/** @param {Pick<Notice, "state" | "attempts" | "status" | "error" | "next_at">} notice */
function outcome({ state, attempts, status, error, next_at: next }) {
  if (state === "delivered") return `Told; the receiver answered ${status}`;
  if (state === "failed") return `Given up after ${attempts} ${attempts === 1 ? "attempt" : "attempts"}: ${error}`;
  if (attempts === 0) return "To be sent";
  return `Not taken${next ? `, again at ${clock(unix(next) ?? 0)}` : ""}: ${error}`;
}

/** @param {string} url */
function hostOf(url) {
  try {
    return new URL(url).host;
  } catch {
    return url;
  }
}
