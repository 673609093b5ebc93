/** One line of the job list; made once, then only changed where the job did. */

import { mesh, placement, unix } from "../lib/format.js";
import { canCancel, isTerminal, title } from "../lib/state.js";
import { Problem, jobPath, post } from "./api.js";
import { confirmed } from "./confirm.js";
import { fill, h, setAttribute, setText } from "./dom.js";
import { ProgressBar, labelChips, showAge, showDuration, stateMark, updateStateMark } from "./parts.js";
import { notify } from "./status.js";

/** @typedef {import("../lib/types.js").Job} Job */

export class JobRow {
  /** @param {(job: Job) => void} changed told when an action changed the job */
  constructor(changed) {
    this.changed = changed;
    /** @type {Job | null} */
    this.job = null;
    this.state = stateMark("queued");
    this.name = h("a", { class: "name" });
    this.under = h("div", { class: "under" });
    this.kind = h("td", { class: "kind" });
    this.progress = new ProgressBar();
    this.note = h("span", { class: "muted note" });
    this.where = h("span", {});
    this.shape = h("span", { class: "muted shape" });
    this.place = h("td", { class: "where" }, this.where, this.shape);
    this.duration = h("td", { class: "right duration" });
    this.age = h("td", { class: "right muted age" });
    this.cancel = h("button", { class: "tiny", type: "button" }, "Cancel");
    this.cancel.addEventListener("click", () => void this.ask());
    this.element = h("tr", {}, h("td", { class: "status" }, this.state), h("td", { class: "what" }, this.name, this.under),
      this.kind, h("td", { class: "advance" }, this.progress.element, this.note),
      this.place, this.duration, this.age, h("td", { class: "right act" }, this.cancel));
  }

  /** @param {Job} job */
  update(job) {
    const known = this.job;
    this.job = job;
    setAttribute(this.element, "data-job", job.id);
    updateStateMark(this.state, job.state);
    setText(this.name, title(job));
    setAttribute(this.name, "href", `/jobs/${encodeURIComponent(job.id)}`);
    if (!known) fill(this.under, h("span", { class: "code muted" }, job.id), ...labelChips(job.labels));
    setText(this.kind, job.kind);
    this.progress.update(job);
    setText(this.note, this.remark(job));
    setText(this.where, job.placement.length ? placement(job.placement) : isTerminal(job.state) ? "–" : "waiting");
    setAttribute(this.where, "class", job.placement.length ? null : "muted");
    setText(this.shape, mesh(job.parallel));
    const nowhere = isTerminal(job.state) && job.placement.length === 0;
    this.shape.hidden = nowhere;
    setAttribute(this.place, "data-none", nowhere);
    showDuration(this.duration, job);
    setAttribute(this.duration, "data-none", !job.started_at);
    showAge(this.age, unix(job.created_at));
    this.cancel.hidden = !canCancel(job.state);
    setAttribute(this.cancel, "aria-label", `Cancel ${title(job)}`);
  }

  /** Why it failed, or what it waits for. @param {Job} job */
  remark(job) {
    if (job.state === "failed" && job.error) return `${job.error.type}: ${job.error.message}`;
    return isTerminal(job.state) ? "" : (job.reason ?? "");
  }

  async ask() {
    const job = this.job;
    if (!job) return;
    const sure = await confirmed(`Cancel “${title(job)}”?`, consequence(job), "Cancel the job", true);
    if (!sure) return;
    try {
      this.changed(await post(jobPath(job.id, "/cancel")));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      notify(error.message, "error");
    }
  }
}

/** What a cancel would do to this job. @param {Job} job */
export const consequence = (job) =>
  job.state === "queued"
    ? "It has not started. It leaves the queue; you can retry it later."
    : "Its processes are asked to stop. Checkpoints and artifacts that exist are kept, and you can retry it later.";
