/** Every state the job went through, when, for how long and why. */

import { clock, dateTime, duration } from "../lib/format.js";
import { isTerminal } from "../lib/state.js";
import { call, items, jobPath } from "../ui/api.js";
import { h, keyed, setText } from "../ui/dom.js";
import { keepCounting, now, stateMark } from "../ui/parts.js";
import { Section } from "./section.js";

/** @typedef {{id: string, event: import("../lib/types.js").JobEvent}} Change */

export class History extends Section {
  constructor() {
    super("History", "history");
    /** @type {Map<string, Change>} */
    this.changes = new Map();
    /** @type {Map<string, {element: Element, update: (change: Change) => void}>} */
    this.rows = new Map();
    this.list = h("ol", { class: "changes" });
    this.body.append(this.list);
  }

  /** @param {import("../lib/types.js").Job} job */
  async fetch(job) {
    const page = await call(jobPath(job.id, "/events?types=state&limit=500"));
    this.changes = new Map(items(page).map((item) => [item.id, { id: item.id, event: item.event ?? item }]));
    this.update();
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ id, event }) {
    if (event.type !== "state") return;
    this.changes.set(event.id ?? id, { id: event.id ?? id, event });
    this.update();
  }

  update() {
    const all = [...this.changes.values()].sort(inOrder);
    keyed(this.list, all, (change) => change.id, (change) => this.row(change), this.rows);
  }

  /** @param {Change} change */
  row({ event }) {
    const spent = h("span", { class: "muted" });
    const why = [event.attempt > 1 && `attempt ${event.attempt}`, event.reason].filter(Boolean).join(" · ");
    const element = h("li", {}, stateMark(event.state),
      h("time", { class: "muted", title: dateTime(event.time) }, clock(event.time)), spent, why && h("p", {}, why));
    return { element, update: (/** @type {Change} */ change) => this.spend(spent, change) };
  }

  /** How long the state lasted, or has lasted. @param {Element} element @param {Change} change */
  spend(element, { id, event }) {
    const next = [...this.changes.values()].filter((change) => inOrder(change, { id, event }) > 0).sort(inOrder)[0];
    if (next) keepCounting(element, () => duration(next.event.time - event.time));
    else if (isTerminal(event.state)) setText(element, "");
    else keepCounting(element, () => duration(now() - event.time));
  }
}

/** The order of the stream: ids are `milliseconds-sequence`. @param {Change} one @param {Change} other */
function inOrder(one, other) {
  const [a, b] = [one.id, other.id].map((id) => id.split("-").map(Number));
  return (a?.[0] ?? 0) - (b?.[0] ?? 0) || (a?.[1] ?? 0) - (b?.[1] ?? 0);
}
