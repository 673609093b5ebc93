/** What the page of an estimate shows. */

import { Metrics } from "../job/metrics.js";
import { Section } from "../job/section.js";
import { fill, h } from "../ui/dom.js";

class Estimate extends Section {
  constructor() {
    super("Estimate of π", "estimate");
  }

  show(job) {
    const estimate = job.result?.estimate;
    fill(this.body, h("p", {}, estimate === undefined ? "Still counting." : `π is about ${estimate.toFixed(4)}.`));
  }
}

export const sections = () => [new Estimate(), new Metrics(true)];
