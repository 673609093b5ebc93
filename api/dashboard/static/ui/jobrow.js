/** One line of the job list; made once, then only changed where the job did. */

import { headline } from "../lib/headline.js";
import { isMeasure } from "../lib/columns.js";
import { flat, swept } from "../lib/compare.js";
import { mesh, number, placement, unix } from "../lib/format.js";
import { placed } from "../lib/queue.js";
import { begun, isTerminal, title } from "../lib/state.js";
import { fill, h, setAttribute, setText } from "./dom.js";
import { Sparkline } from "./sparkline.js";
import { ProgressBar, labelChips, showAge, showDuration, stateMark, updateBadge, updateStateMark } from "./parts.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/types.js").QueueLine} QueueLine */

/**
 * @typedef {object} RowEvents
 * @property {(id: string, selected: boolean) => void} selected
 * @property {(id: string) => void} unfolded told when the jobs of a sweep are to be shown or hidden
 */

export class JobRow {
  /** @param {RowEvents} events */
  constructor(events) {
    /** @type {Job | null} */
    this.job = null;
    this.box = h("input", { type: "checkbox" });
    this.box.addEventListener("change", () => this.job && events.selected(this.job.id, this.box.checked));
    this.state = stateMark("queued");
    this.fold = h("button", { class: "fold", type: "button", "aria-expanded": "false", hidden: true }, "▸");
    this.fold.addEventListener("click", () => this.job && events.unfolded(this.job.id));
    this.name = h("a", { class: "name" });
    this.labels = h("span", { class: "labels" });
    this.kind = h("td", { class: "kind muted" });
    this.progress = new ProgressBar();
    this.curve = new Sparkline();
    this.note = h("span", { class: "note" });
    this.badge = h("span", { class: "badge", hidden: true });
    this.outcome = h("td", { class: "outcome" }, h("div", { class: "line" }, this.badge, this.progress.element, this.curve.element, this.note));
    this.owner = h("a", {});
    this.project = h("a", { class: "muted" });
    this.priority = h("td", { class: "right muted priority" });
    this.place = h("td", { class: "where muted" });
    this.duration = h("td", { class: "right duration" });
    this.age = h("td", { class: "right muted age" });
    /** Cells of columns that can be left out. @type {Map<string, HTMLElement>} */
    this.cells = new Map([["kind", this.kind], ["outcome", this.outcome],
      ["owner", h("td", { class: "owner" }, h("div", { class: "line" }, this.owner, this.project))],
      ["priority", this.priority], ["where", this.place], ["duration", this.duration], ["age", this.age]]);
    this.fixed = [h("td", { class: "pick" }, h("label", {}, this.box)), h("td", { class: "status" }, this.state),
      h("td", { class: "what" }, h("div", { class: "line" }, this.fold, this.name, this.labels))];
    this.element = h("tr", {}, ...this.fixed);
    this.laid = "";
  }

  /** Shows these columns. @param {readonly string[]} columns */
  lay(columns) {
    if (this.job) for (const name of columns.filter(isMeasure)) this.measured(name, this.job);
    if (columns.join() === this.laid) return;
    this.laid = columns.join();
    this.element.replaceChildren(...this.fixed, ...columns.flatMap((name) => this.cells.get(name) ?? []));
  }

  /** A number of the result. @param {string} path @param {Job} job */
  measured(path, job) {
    const cell = this.cells.get(path) ?? h("td", { class: "right measure" });
    this.cells.set(path, cell);
    const value = flat(job.result ?? {}, "result").get(path);
    setText(cell, typeof value === "number" ? number(value) : "–");
    setAttribute(cell, "data-none", typeof value !== "number");
  }

  /** What is known beside the job: its place in the queue, how its main metric went. @param {QueueLine | undefined} line @param {import("../lib/series.js").Series | undefined} series */
  beside(line, series) {
    const { job } = this;
    if (!job) return;
    const shown = job.state === "running" ? series : undefined;
    this.curve.show(shown?.value ?? []);
    const last = shown?.value.at(-1);
    const words = headline(job);
    const told = job.state === "queued" ? placed(line, words) : [last !== undefined && `loss ${number(last)}`, words].filter(Boolean).join(" · ");
    setText(this.note, told);
    setAttribute(this.note, "title", told || null);
  }

  /** @param {Job} job */
  update(job) {
    if (!this.job) this.settle(job);
    this.job = job;
    updateStateMark(this.state, job.state);
    updateBadge(this.badge, job);
    this.progress.update(job);
    if (isTerminal(job.state) || job.children) this.progress.element.hidden = true; // a sweep's counts stand in the note
    setAttribute(this.note, "data-tone", job.state === "failed" ? "bad" : job.state === "succeeded" ? "result" : null);
    const where = job.placement.length ? placement(job.placement) : "";
    setText(this.place, where || "–");
    setAttribute(this.place, "title", where ? `${where}, ${mesh(job.parallel ?? undefined)}` : null);
    setAttribute(this.place, "data-none", !where);
    showDuration(this.duration, job);
    setAttribute(this.duration, "data-none", !begun(job));
  }

  /** Shows what never changes. @param {Job} job */
  settle(job) {
    setAttribute(this.element, "data-job", job.id);
    setAttribute(this.element, "data-child", Boolean(job.sweep));
    setAttribute(this.box, "aria-label", `Select ${title(job)}`);
    setText(this.name, swept(job) || title(job));
    setAttribute(this.name, "href", `/jobs/${encodeURIComponent(job.id)}`);
    setAttribute(this.name, "title", `${title(job)}, ${job.id}`);
    if (!job.sweep) fill(this.labels, ...labelChips(job.labels));
    this.fold.hidden = !job.children;
    setAttribute(this.fold, "aria-label", `Jobs of the sweep ${title(job)}`);
    setText(this.kind, job.kind);
    setText(this.owner, job.owner);
    setAttribute(this.owner, "href", `/?owner=${encodeURIComponent(job.owner)}`);
    setAttribute(this.owner, "title", `jobs of ${job.owner}`);
    setText(this.project, job.project);
    setAttribute(this.project, "href", `/?project=${encodeURIComponent(job.project)}`);
    setAttribute(this.project, "title", `jobs of the project ${job.project}`);
    this.project.hidden = job.project === "default";
    setText(this.priority, number(job.priority));
    setAttribute(this.priority, "data-none", job.priority === 0);
    showAge(this.age, unix(job.created_at));
  }

  /** @param {boolean} isSelected @param {boolean} isUnfolded */
  mark(isSelected, isUnfolded) {
    this.box.checked = isSelected;
    setAttribute(this.element, "data-selected", isSelected);
    setAttribute(this.fold, "aria-expanded", String(isUnfolded));
  }
}

/** What a cancel would do to this job. @param {Job} job */
export const consequence = (job) =>
  job.state === "queued"
    ? "It has not started. It leaves the queue; you can retry it later."
    : "Its processes are asked to stop. Checkpoints and artifacts that exist are kept, and you can retry it later.";
