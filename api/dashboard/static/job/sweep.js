/** The jobs of a sweep or a chain: their values or names, state and metric, with links to each. */

import { comparePath } from "../lib/compare.js";
import { number } from "../lib/format.js";
import { STATES, isTerminal } from "../lib/state.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, setAttribute } from "../ui/dom.js";
import { showDuration, stateMark } from "../ui/parts.js";
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
    this.draw(job, jobs.reverse(), children.best?.job);
  }

  /** @param {Job} job @param {Job[]} jobs @param {string | undefined} best */
  draw(job, jobs, best) {
    const paths = [...new Set(jobs.flatMap((each) => Object.keys(each.parameters ?? {})))];
    /** @type {string | undefined} */
    const metric = job.spec.sweep?.best?.metric;
    const head = ["Job", ...paths, "State", ...(metric ? [metric] : []), "Time"];
    fill(this.body, h("div", { class: "scroll" }, h("table", { class: "table" },
      h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col", class: name === metric || name === "Time" ? "right" : null }, name)))),
      h("tbody", {}, ...jobs.map((each) => row(each, paths, metric, each.id === best))))));
  }
}

/** @param {Job} job @param {string[]} paths @param {string | undefined} metric @param {boolean} best */
function row(job, paths, metric, best) {
  const time = h("td", { class: "right" });
  showDuration(time, job);
  return h("tr", { "data-job": job.id },
    h("td", {}, h("a", { class: "code", href: `/jobs/${encodeURIComponent(job.id)}`, title: job.id }, `…${job.id.slice(-5)}`)),
    ...paths.map((path) => h("td", {}, shown(job.parameters?.[path]))),
    h("td", {}, stateMark(job.state)),
    metric && h("td", { class: "right" }, best ? h("strong", {}, measured(job, metric)) : measured(job, metric)),
    time);
}

/** @param {unknown} value */
const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

/** The number at a dotted path of a result. @param {Job} job @param {string} path */
function measured(job, path) {
  /** @type {any} */
  let value = job.result;
  for (const name of path.split(".")) value = value && typeof value === "object" ? value[name] : undefined;
  return typeof value === "number" ? number(value) : "–";
}
