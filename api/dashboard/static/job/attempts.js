/** The attempts of a job that had several, side by side: when, for how long, how far, and why each ended. */

import { attempts } from "../lib/attempts.js";
import { clock, dateTime, duration, number } from "../lib/format.js";
import { call, items, jobPath } from "../ui/api.js";
import { fill, h } from "../ui/dom.js";
import { downloadLink, now, stateMark, withHeadings } from "../ui/parts.js";
import { rail } from "../ui/rail.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Job} Job */

export class Attempts extends Section {
  constructor() {
    super("Attempts", "attempts");
    this.table = h("table", { class: "table cards" });
    this.body.append(h("div", { class: "scroll" }, this.table));
    this.element.hidden = true;
    this.attempt = 0;
    this.state = "";
  }

  /** @param {Job} job */
  async fetch(job) {
    this.attempt = job.attempt;
    this.state = job.state;
    if (job.attempt < 2) return;
    const changes = items(await call(jobPath(job.id, "/events?types=state&limit=500"))).map((item) => item.event ?? item);
    const { series } = await call(jobPath(job.id, "/metrics?names=loss&max_points=1000"));
    this.update(job, attempts(changes, series.loss ?? null));
  }

  /** @param {Job} job */
  show(job) {
    const isNews = this.attempt > 0 && (job.attempt !== this.attempt || job.state !== this.state);
    if (isNews && job.attempt > 1) void this.load(job);
  }

  /** @param {Job} job @param {import("../lib/attempts.js").Attempt[]} all */
  update(job, all) {
    this.element.hidden = all.length < 2;
    const [from, to] = [all[0]?.began ?? 0, all.at(-1)?.ended ?? now()];
    const share = (/** @type {number} */ time) => (time - from) / (to - from || 1);
    const stepped = all.some(({ steps }) => steps);
    const heads = ["Attempt", "Began", "When", "Ran for", stepped && "Steps", "Left the job", "Why", "Log"];
    const row = (/** @type {import("../lib/attempts.js").Attempt} */ one) => h("tr", { "data-attempt": one.number },
      h("td", {}, one.number), h("td", { title: dateTime(one.began) }, clock(one.began)),
      h("td", {}, rail(share(one.began), share(one.ended ?? to))), h("td", {}, duration((one.ended ?? now()) - one.began)),
      stepped && h("td", {}, one.steps ? `${number(one.steps[0])} to ${number(one.steps[1])}` : "–"),
      h("td", {}, stateMark(one.how)), h("td", { class: "why" }, one.why || "–"),
      h("td", {}, downloadLink({ download: `${job.id}-${one.number}.log` }, jobPath(job.id, `/logs?attempt=${one.number}`), "log")));
    fill(this.table, h("thead", {}, h("tr", {}, ...heads.flatMap((name) => (name ? [h("th", { scope: "col" }, name)] : [])))),
      h("tbody", {}, ...all.map(row)));
    withHeadings(this.table);
  }
}
