/** The search for one instance's verdict, while it runs and after: domains, and what is proved over all of them. */

import { duration, fixed, many, number } from "../lib/format.js";
import { extent } from "../lib/scales.js";
import { curves, latest, longest, take } from "../lib/search.js";
import { isTerminal } from "../lib/state.js";
import { call, items, jobPath } from "../ui/api.js";
import { Crosshair } from "../ui/canvas.js";
import { Chart } from "../ui/chart.js";
import { h, oncePerFrame, setAttribute } from "../ui/dom.js";
import { Section } from "./section.js";

const PAGE = 500;
/** Of searches past; of one that runs, events tell the rest. */
const MOST_PAGES = 20;
const AXIS = { label: duration, word: "after" };

export class Search extends Section {
  constructor() {
    super("Search", "search");
    /** @type {Map<number, import("../lib/search.js").Moment[]>} */
    this.searches = new Map();
    /** @type {number | null} an instance that the user chose; the newest otherwise */
    this.chosen = null;
    const crosshair = new Crosshair();
    this.domains = new Chart({ title: "Domains", unit: "bounded, and still open", log: true }, crosshair, AXIS);
    this.bound = new Chart({ title: "Proved bound", unit: "of the margin, over all domains", log: false }, crosshair, AXIS);
    this.choice = h("select", { "aria-label": "Instance" });
    this.ended = false;
    this.choice.addEventListener("change", () => this.choose(this.choice.value === "" ? null : Number(this.choice.value)));
    this.aside.append(this.choice);
    this.pair = h("div", { class: "pair" }, this.domains.element, this.bound.element);
    this.body.append(this.pair);
    this.element.hidden = true;
    this.draw = oncePerFrame(() => this.update());
  }

  /** @param {import("../lib/types.js").Job} job */
  async fetch(job) {
    /** @type {typeof this.searches} */
    const searches = new Map();
    let after = "0-0";
    for (let page = 0; page < MOST_PAGES; page += 1) {
      const found = await call(jobPath(job.id, `/events?types=search&limit=${PAGE}&after=${encodeURIComponent(after)}`));
      for (const event of items(found)) take(searches, event);
      if (items(found).length < PAGE) break;
      after = found.next_after;
    }
    this.searches = searches;
    this.update();
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    if (this.ended === isTerminal(job.state)) return;
    this.ended = isTerminal(job.state);
    this.draw();
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type !== "search") return;
    take(this.searches, event);
    this.draw();
  }

  update() {
    this.element.hidden = this.searches.size === 0;
    this.list();
    const instance = this.chosen ?? (this.ended ? longest(this.searches) : latest(this.searches));
    const moments = (instance !== null && this.searches.get(instance)) || [];
    const last = moments.at(-1);
    if (!last) return;
    // The one moment of a search that ended at once stands in the heading: there is nothing to draw.
    this.pair.hidden = this.ended && moments.length < 2;
    const found = curves(moments);
    const reach = extent([[0, last.seconds]]);
    this.domains.set(found.domains, reach);
    this.bound.set(found.bound, reach);
    this.remark([`instance ${instance}`, many(last.domains, "domain"), `${number(last.open)} open`,
      last.bound !== null && `bound ${fixed(last.bound)}`, duration(last.seconds)].filter(Boolean).join(" · "));
  }

  /** Shows one instance's search, if there was one; the newest for null. @param {number | null} instance */
  choose(instance) {
    if (instance !== null && !this.searches.has(instance)) return;
    this.chosen = instance;
    this.choice.value = instance === null ? "" : String(instance);
    this.update();
  }

  list() {
    const known = [...this.searches.keys()].sort((a, b) => a - b);
    setAttribute(this.choice, "hidden", known.length < 2);
    const wanted = ["", ...known.map(String)];
    const word = this.ended ? "the longest" : "newest";
    if (this.choice.options[0]?.text === word && wanted.join() === [...this.choice.options].map((option) => option.value).join()) return;
    this.choice.replaceChildren(...wanted.map((value) => h("option", { value }, value === "" ? word : `instance ${value}`)));
    this.choice.value = this.chosen === null ? "" : String(this.chosen);
  }
}
