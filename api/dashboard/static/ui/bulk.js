/** The bar for selected jobs: asks once, acts on each, and names those that refused. */

import { many } from "../lib/format.js";
import { comparePath } from "../lib/compare.js";
import { ACTIONS, hopeless, question, report } from "../lib/selection.js";
import { Problem, call, jobPath, post } from "./api.js";
import { confirmed } from "./confirm.js";
import { fill, h, setAttribute, setText } from "./dom.js";
import { notify } from "./status.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/selection.js").BulkAction} BulkAction */

/** Requests at a time. */
const TOGETHER = 4;

/** @type {Record<string, (id: string) => Promise<unknown>>} */
const CALLS = {
  Cancel: (id) => post(jobPath(id, "/cancel")),
  Retry: (id) => post(jobPath(id, "/retry")),
  Delete: (id) => call(jobPath(id), { method: "DELETE" }),
};

export class BulkBar {
  /** @param {(left: readonly string[]) => void} ended told which jobs stay selected once an action is over */
  constructor(ended) {
    this.ended = ended;
    /** @type {Job[]} */
    this.jobs = [];
    this.count = h("span", { class: "count" });
    this.buttons = new Map(ACTIONS.map((action) => [action, this.button(action)]));
    this.compare = h("a", { class: "button small" }, "Compare");
    const clear = h("button", { class: "quiet", type: "button", "aria-label": "Clear the selection" }, "Clear");
    clear.addEventListener("click", () => this.ended([]));
    this.element = h("div", { class: "bulk", role: "region", "aria-label": "Selected jobs", hidden: true },
      this.count, this.compare, ...this.buttons.values(), clear);
  }

  /** @param {boolean} may whether the key may change jobs */
  allow(may) {
    for (const button of this.buttons.values()) button.hidden = !may;
  }

  /** @param {BulkAction} action */
  button(action) {
    const button = h("button", { class: "button small", type: "button" }, action.name);
    button.addEventListener("click", () => void this.ask(action));
    return button;
  }

  /** @param {Job[]} jobs that are selected */
  show(jobs) {
    this.jobs = jobs;
    this.element.hidden = jobs.length === 0;
    setText(this.count, `${many(jobs.length, "job")} selected`);
    setAttribute(this.compare, "href", comparePath(jobs));
    this.compare.hidden = jobs.length < 2 && !jobs.some((job) => job.children);
    for (const [action, button] of this.buttons) {
      const suited = jobs.filter((job) => action.suits(job)).length;
      button.disabled = suited === 0;
      setText(button, suited ? `${action.name} ${suited}` : action.name);
    }
  }

  /** @param {BulkAction} action */
  async ask(action) {
    const selected = this.jobs;
    const suited = selected.filter((job) => action.suits(job));
    const { heading, detail } = question(action, suited.length, selected.length);
    const go = `${action.name} ${many(suited.length, "job")}`;
    if (!(await confirmed(heading, detail, go, action.name !== "Retry"))) return;
    const left = hopeless(action, selected);
    const failures = [...(await each(suited, CALLS[action.name] ?? post)), ...left];
    const { heading: told, lines } = report(action, failures, suited.length + left.length);
    this.ended(failures.map(({ job }) => job.id));
    if (lines.length === 0) notify(told);
    else refusals(told, lines);
  }
}

/**
 * Calls for each job, a few at a time, and returns those that were refused.
 * @param {Job[]} jobs
 * @param {(id: string) => Promise<unknown>} act
 */
async function each(jobs, act) {
  /** @type {{job: Job, why: string}[]} */
  const failures = [];
  const waiting = [...jobs];
  const work = async () => {
    for (let job = waiting.shift(); job; job = waiting.shift()) {
      try {
        await act(job.id);
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        failures.push({ job, why: error.message });
      }
    }
  };
  await Promise.all(Array.from({ length: TOGETHER }, work));
  return failures;
}

/** @param {string} heading @param {{id: string, words: string, why: string}[]} lines */
function refusals(heading, lines) {
  const items = lines.map(({ id, words, why }) =>
    h("li", {}, h("a", { href: `/jobs/${encodeURIComponent(id)}` }, words), h("p", {}, why)));
  const dialog = h("dialog", { class: "question refusals", "aria-labelledby": "refusals" },
    h("form", { method: "dialog" }, h("h2", { id: "refusals" }, heading), h("ul", {}),
      h("div", { class: "buttons" }, h("button", { class: "button primary" }, "Close"))));
  fill(/** @type {Element} */ (dialog.querySelector("ul")), ...items);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
