/** The jobs of a sweep or a chain: their values or names, state and metric, with links to each. */

import { comparePath, flat, names, order } from "../lib/compare.js";
import { number } from "../lib/format.js";
import { STATES, isTerminal } from "../lib/state.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, setAttribute } from "../ui/dom.js";
import { showDuration, stateMark, updateBadge, withHeadings } from "../ui/parts.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */

const PAGE = 1000;
/** How often the jobs of a sweep that runs are asked for: its own events tell only of those that ended. */
const POLL_MS = 5000;

export class Sweep extends Section {
  /** @param {"sweep" | "chain"} what */
  constructor(what) {
    super(`Jobs of the ${what}`, "sweep");
    /** @type {Job | null} */
    this.job = null;
    this.compare = h("a", { class: "button small", hidden: true }, "Compare");
    this.aside.append(this.compare);
    window.setInterval(() => {
      if (this.job && !isTerminal(this.job.state) && !document.hidden) void this.load(this.job);
    }, POLL_MS);
  }

  /** @param {Job} job */
  show(job) {
    const before = this.job;
    this.job = job;
    setAttribute(this.compare, "href", comparePath([job]));
    this.compare.hidden = job.kind === "chain";
    if (before && (before.state !== job.state || before.progress?.done !== job.progress?.done)) void this.load(job);
  }

  /** @param {Job} job */
  async fetch(job) {
    /** @type {Job[]} */
    const jobs = [];
    /** @type {string | null} */
    let cursor = "";
    while (cursor !== null) {
      const after = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
      const page = await call(`/v1/jobs?sweep=${encodeURIComponent(job.id)}&limit=${PAGE}${after}`);
      jobs.push(...page.items);
      cursor = page.next_cursor;
    }
    const { children } = await call(jobPath(job.id));
    this.remark(STATES.filter((state) => children[state]).map((state) => `${children[state]} ${state}`).join(", "));
    this.draw(job, ranked(jobs.reverse(), job.spec.sweep?.best), children.best?.job);
  }

  /** @param {Job} job @param {Job[]} jobs @param {string | undefined} best */
  draw(job, jobs, best) {
    /** @type {string | undefined} */
    const metric = job.spec.sweep?.best?.metric;
    const told = names(jobs);
    const head = ["Job", "State", ...(metric ? [metric.replaceAll("_", " ")] : ["Answer"]), "Time"];
    const table = h("table", { class: "table cards swept" },
      h("thead", {}, h("tr", {}, ...head.map((name, index) => h("th", { scope: "col", class: index > 1 ? "right" : null }, name)))),
      h("tbody", {}, ...jobs.map((each, index) => row(each, told[index] ?? "", metric, each.id === best))));
    withHeadings(table);
    fill(this.body, table);
  }
}

/**
 * The jobs from the best to the worst, if the sweep says what is best; those without that number come last.
 * @param {Job[]} jobs @param {{metric: string, mode: string} | undefined} best
 */
const ranked = (jobs, best) => (best ? order(jobs.map((job) => valueAt(job, best.metric)), best.mode === "max").map((index) => /** @type {Job} */ (jobs[index])) : jobs);

/** @param {Job} job @param {string} name @param {string | undefined} metric @param {boolean} best */
function row(job, name, metric, best) {
  const time = h("td", { class: "right" });
  showDuration(time, job);
  const badge = h("span", { class: "badge" });
  updateBadge(badge, job);
  const measured = metric ? number(valueAt(job, metric)) : badge;
  return h("tr", { "data-job": job.id },
    h("th", { scope: "row", class: "title" }, h("a", { href: `/jobs/${encodeURIComponent(job.id)}`, title: job.id }, name)),
    h("td", { title: job.result?.ended_early ?? null }, stateMark(job.state), job.result?.ended_early ? ` at step ${job.result.steps}` : undefined),
    h("td", { class: "right" }, best ? h("strong", { title: "the best one" }, measured) : measured), time);
}

/** The number at a dotted path of a result. @param {Job} job @param {string} path */
function valueAt(job, path) {
  const value = flat(job.result ?? {}).get(path);
  return typeof value === "number" ? value : null;
}
