/** What the job is, where it runs and what it needs. */

import { dateTime, duration, many, mesh, ranges, unix, visible } from "../lib/format.js";
import { opened, title as rungTitle } from "../lib/report.js";
import { dependencies, lasted, title } from "../lib/state.js";
import { answer, headline } from "../lib/headline.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, setAttribute, setText } from "../ui/dom.js";
import { keepCounting, labelChips, now, stateMark, updateStateMark } from "../ui/parts.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */

/** Jobs that use this one which are named; the list has all. */
const USERS = 6;

export class Details extends Section {
  constructor() {
    super("Details", "details");
    this.list = h("dl", { class: "facts" });
    this.users = h("div", { class: "users", hidden: true });
    this.body.append(this.list, this.users);
    this.shown = "";
    /** @type {Map<string, HTMLElement>} */
    this.links = new Map();
  }

  /** Which jobs verify or check this one's model, take it up, or run after it. @param {Job} job */
  async fetch(job) {
    const { items: found, next_cursor: more } = await call(`/v1/jobs?needs=${encodeURIComponent(job.id)}&limit=${USERS}`);
    this.users.hidden = found.length === 0;
    const all = h("a", { href: `/?needs=${encodeURIComponent(job.id)}` }, more ? "All of them" : many(found.length, "job"));
    fill(this.users, h("h3", {}, "Used by ", all), ...found.map(user));
  }

  /** @param {Job} job */
  show(job) {
    const signature = JSON.stringify([job.attempt, job.started_at, job.ended_at, job.placement, job.labels, job.phases]);
    if (signature === this.shown) return;
    this.shown = signature;
    fill(this.list, ...facts(job, this.needs(job), compiled(job)).flatMap(([term, value]) =>
      value === null ? [] : [h("dt", {}, term), h("dd", {}, ...(Array.isArray(value) ? value : [value]))]));
  }

  /** Links to the jobs that this one needs; name and state are filled in when known. @param {Job} job */
  needs(job) {
    const all = dependencies(job).map(({ id, why }) => {
      const link = this.links.get(id) ?? this.need(id, why);
      this.links.set(id, link);
      return link;
    });
    return all.length ? all : null;
  }

  /** @param {string} id @param {string} why */
  need(id, why) {
    const mark = stateMark("queued");
    mark.hidden = true;
    const link = h("a", { href: `/jobs/${encodeURIComponent(id)}`, title: id }, id);
    void call(jobPath(id)).then((/** @type {Job} */ job) => {
      setText(link, title(job));
      updateStateMark(mark, job.state);
      mark.hidden = false;
    }, () => setAttribute(link, "class", "muted"));
    return h("div", { class: "need" }, link, h("div", {}, h("span", { class: "muted" }, why), mark));
  }
}

/** @param {Job} job */
function user(job) {
  const told = [answer(job)?.words, headline(job)].filter(Boolean).join(", ");
  return h("div", { class: "need" }, h("a", { href: `/jobs/${encodeURIComponent(job.id)}`, title: job.id }, title(job)),
    h("div", {}, stateMark(job.state), h("span", { class: "muted cut", title: told || null }, told || job.kind)));
}

/** What is compiled, by whose permission; the mode is filled in when the gate is known. @param {Job} job */
function compiled(job) {
  const { gate, ...asked } = job.spec.compile ?? {};
  const phases = ["train", "inference"].filter((phase) => asked[phase] === true);
  if (!gate || phases.length === 0) return null;
  const words = h("span", {}, phases.join(", "));
  const link = h("a", { href: `/jobs/${encodeURIComponent(gate)}`, title: gate }, gate);
  void call(jobPath(gate)).then((/** @type {Job} */ checked) => {
    setText(link, title(checked));
    const mode = opened(checked.result?.gate, phases, checked.spec.modes ?? []);
    if (mode) setText(words, `${phases.join(", ")} with ${rungTitle(mode)}`);
  }, () => {});
  return [words, h("span", { class: "muted" }, ", by the gate of "), link];
}

/** @param {Job} job @param {HTMLElement[] | null} needs @param {HTMLElement[] | null} compiling @returns {[string, import("../ui/dom.js").Child | import("../ui/dom.js").Child[] | null][]} */
function facts(job, needs, compiling) {
  const labels = labelChips(job.labels);
  const eager = Object.entries(job.result?.eager ?? {});
  return [
    ["Runs on", job.placement.length ? job.placement.map(share) : null],
    ["Computed by", job.computed_by?.length ? job.computed_by.map((by, _, all) => computer(by, all.length > 1)) : null],
    ["Parallel", job.children ? null : mesh(job.spec.parallel)],
    ["Needs", needs],
    ["Part of", job.sweep ? h("a", { href: `/jobs/${encodeURIComponent(job.sweep)}` }, job.sweep) : null],
    ["Compiled", compiling],
    ["Went on in eager", eager.length ? eager.map(([phase, why]) => h("div", {}, `${phase}: ${why}`)) : null],
    ["Labels", labels.length ? [h("span", { class: "chips" }, ...labels)] : null],
    ["Attempt", job.children ? null : String(job.attempt)],
    ["Priority", String(job.priority)],
    ["Owner", job.owner],
    ["Created", dateTime(unix(job.created_at))],
    ["Started", job.started_at ? dateTime(unix(job.started_at)) : null],
    ["Phases", job.phases?.length ? job.phases.map(phase) : null],
    ["Ended", job.ended_at ? dateTime(unix(job.ended_at)) : null],
  ];
}

/** @param {import("../lib/types.js").Phase} one */
function phase(one) {
  const spent = h("span", { class: "muted" });
  keepCounting(spent, () => duration(lasted(one, now())));
  return h("div", { "data-phase": one.name }, `${visible(one.name)} `, spent);
}

/** @param {import("../lib/types.js").ComputedBy} by @param {boolean} several */
function computer({ attempt, host, pool, devices, threads, versions }, several) {
  const told = Object.entries(versions).map(([name, version]) => `${name} ${version}`).sort();
  const on = [host, devices?.length ? devices.join(", ") : pool, threads ? many(threads, "thread") : ""].filter(Boolean);
  const line = visible([...on, ...told].join("  ·  "));
  return h("div", { "data-computed-by": attempt }, several && h("span", { class: "muted" }, `Attempt ${attempt}: `), line);
}

/** @param {import("../lib/types.js").HostShare} part */
const share = (part) =>
  h("div", {}, h("a", { href: "/hosts" }, part.host), h("span", { class: "muted" }, ` ${part.pool ?? ""} ${ranges(part.devices)}`));
