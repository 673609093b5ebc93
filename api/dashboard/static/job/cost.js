/** Where a verification job's time went, and the most memory that it took. */

import { duration, number, percent } from "../lib/format.js";
import { fill, h } from "../ui/dom.js";
import { rail } from "../ui/rail.js";
import { Section } from "./section.js";

/** Maps, since the names come from a job: an object would answer to `constructor` too. */
const WORDS = new Map([["prepare", "preparing the model"], ["witnesses", "checking samples and centres"],
  ["layers", "bounding hidden layers"], ["outputs", "bounding outputs and the property"],
  ["attack", "attacking"], ["search", "searching"], ["replays", "checking what was verified"]]);

export class Cost extends Section {
  constructor() {
    super("Time and memory", "cost");
    this.element.hidden = true;
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    const spent = Object.entries(job.result?.time ?? {}).filter(([, seconds]) => typeof seconds === "number" && seconds > 0);
    const whole = spent.reduce((sum, [, seconds]) => sum + seconds, 0);
    this.element.hidden = whole <= 0;
    const memory = job.result?.memory_gib;
    this.remark(["means over ranks", typeof memory === "number" && `${number(memory, 3)} GiB at most`].filter(Boolean).join(" · "));
    fill(this.body, h("ol", { class: "bars cost" }, ...spent.map(([name, seconds]) =>
      h("li", {}, h("span", {}, WORDS.get(name) ?? name), rail(0, seconds / whole), h("span", { class: "right" }, duration(seconds)),
        h("span", { class: "right muted" }, percent(seconds / whole))))));
  }
}
