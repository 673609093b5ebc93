/** The head of the job page: what it is, how it goes, what went wrong, and what can be done about it. */

import { percent, placement, visible } from "../lib/format.js";
import { turn } from "../lib/queue.js";
import { begun, canCancel, canRetry, fraction, isTerminal, progressWords, title, wholePercent } from "../lib/state.js";
import { Problem, artifactPath, jobPath, post } from "../ui/api.js";
import { confirmed } from "../ui/confirm.js";
import { fill, h, setAttribute, setText } from "../ui/dom.js";
import { consequence } from "../ui/jobrow.js";
import { maySubmit } from "../ui/me.js";
import { ProgressBar, downloadLink, showDuration, stateMark, updateBadge, updateStateMark } from "../ui/parts.js";
import { notify } from "../ui/status.js";

/** @typedef {import("../lib/types.js").Job} Job */

export class Header {
  /** @param {(job: Job) => void} changed told when an action changed the job */
  constructor(changed) {
    this.changed = changed;
    /** @type {Job | null} */
    this.job = null;
    this.name = h("h1", {});
    this.state = stateMark("queued");
    this.state.classList.add("pill");
    this.badge = h("span", { class: "badge", hidden: true });
    this.kind = h("span", { class: "muted kindword" });
    this.where = h("span", { class: "muted" });
    this.duration = h("span", { class: "muted" });
    this.reason = h("p", { class: "reason muted" });
    this.turn = h("p", { class: "reason turn muted" });
    this.progress = new ProgressBar();
    this.counts = h("span", { class: "muted" });
    this.advance = h("div", { class: "advance" }, this.progress.element, this.counts);
    this.error = h("div", { class: "failure", role: "alert" });
    this.cancel = this.button("Cancel", "button", () => this.askCancel());
    this.retry = this.button("Retry", "button primary", () => this.askRetry());
    this.actions = h("div", { class: "actions" }, ...this.onward(), this.cancel, this.retry);
    void maySubmit().then((may) => (this.actions.hidden = !may));
    this.element = h("div", { class: "jobhead" },
      h("div", { class: "row" }, this.name, this.actions),
      h("div", { class: "facts-line" }, this.state, this.badge, this.kind, this.where, this.duration),
      this.reason, this.turn, this.advance, this.error);
  }

  /** Links to new jobs that begin with this one. */
  onward() {
    this.again = h("a", { class: "button" }, "Run again…");
    this.verify = h("a", { class: "button" }, "Verify…");
    this.compile = h("a", { class: "button" }, "Compile-check…");
    return [this.verify, this.compile, this.again];
  }

  /** @param {Job} job */
  showOnward(job) {
    const id = encodeURIComponent(job.id);
    const isModel = job.kind === "train" && !job.spec.program && !job.children && isTerminal(job.state);
    setAttribute(/** @type {Element} */ (this.again), "href", `/submit?from=${id}`);
    for (const [link, kind] of /** @type {const} */ ([[this.verify, "verify"], [this.compile, "compile"]])) {
      if (!link) continue;
      setAttribute(link, "href", `/submit?kind=${kind}&model=${id}`);
      link.hidden = !isModel || job.state !== "succeeded";
    }
  }

  /** @param {string} label @param {string} look @param {() => Promise<void>} act */
  button(label, look, act) {
    const button = h("button", { class: look, type: "button", id: label.toLowerCase() }, label);
    button.addEventListener("click", () => void act());
    return button;
  }

  /** @param {Job} job */
  show(job) {
    this.job = job;
    setText(this.name, title(job));
    updateStateMark(this.state, job.state);
    updateBadge(this.badge, job);
    setText(this.kind, job.kind);
    setText(this.where, job.placement.length ? placement(job.placement) : "");
    showDuration(this.duration, job);
    this.duration.hidden = !begun(job);
    setText(this.reason, isTerminal(job.state) && job.state !== "succeeded" ? "" : (job.reason ?? ""));
    if (job.state !== "queued") setText(this.turn, "");
    this.progress.update(job);
    this.advance.hidden = job.state === "succeeded" || !job.progress;
    setText(this.counts, job.progress ? progressWords(job.progress) : "");
    this.cancel.hidden = !canCancel(job.state);
    this.retry.hidden = !canRetry(job);
    this.showOnward(job);
    this.showError(job);
    document.title = visible(`${mark(job)}${title(job)} · Trivet`);
  }

  /** @param {import("../lib/types.js").QueueLine | null} line the job's line of the queue, while it has one */
  showTurn(line) {
    setText(this.turn, this.job?.state === "queued" ? turn(line, Date.now()) : "");
  }

  /** @param {Job} job */
  showError(job) {
    const error = job.state === "failed" ? job.error : null;
    this.error.hidden = !error;
    if (!error) return;
    const rank = error.rank === null || error.rank === undefined ? "" : ` on rank ${error.rank}`;
    const trace = error.traceback_artifact;
    fill(this.error, h("strong", {}, `${error.type}${rank}`), h("p", { class: "code" }, error.message),
      trace && downloadLink({}, artifactPath(job.id, trace), "Traceback"));
  }

  async askCancel() {
    const job = this.job;
    if (job && (await confirmed(`Cancel “${title(job)}”?`, consequence(job), "Cancel the job", true))) {
      await this.act(job, "/cancel");
    }
  }

  async askRetry() {
    const job = this.job;
    const detail = "It is queued again as a new attempt and resumes from its last checkpoint, if it has one.";
    if (job && (await confirmed(`Retry “${title(job)}”?`, detail, "Retry the job"))) await this.act(job, "/retry");
  }

  /** @param {Job} job @param {string} action */
  async act(job, action) {
    setAttribute(this.element, "aria-busy", "true");
    try {
      this.changed(await post(jobPath(job.id, action)));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      notify(error.message, "error");
    } finally {
      setAttribute(this.element, "aria-busy", null);
    }
  }
}

/** How far the job is, in front of the tab's title. @param {Job} job */
function mark(job) {
  const part = fraction(job);
  if (job.state === "running" && part !== null) return `${percent(wholePercent(part) / 100)} `;
  return { succeeded: "✓ ", failed: "✗ " }[/** @type {string} */ (job.state)] ?? "";
}
