/** A part of the job page: it fetches its snapshot, then takes events; nothing is lost or doubled in between. */

import { Problem } from "../ui/api.js";
import { fill, h, setText } from "../ui/dom.js";
import { blank } from "../ui/status.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/types.js").StreamedEvent} StreamedEvent */

export class Section {
  /**
   * @param {string} heading
   * @param {string} name of the section, for links and tests
   */
  constructor(heading, name) {
    this.note = h("span", { class: "note" });
    this.aside = h("span", { class: "aside" });
    this.body = h("div", { class: "body" });
    this.notice = h("div", {});
    this.element = h("section", { class: `panel ${name} awaited`, id: name, "aria-label": heading },
      h("header", {}, h("h2", {}, heading), this.note, this.aside), this.notice, this.body);
    /** @type {StreamedEvent[] | null} events that wait for the snapshot */
    this.waiting = null;
    this.loads = 0;
  }

  /**
   * Fetches what happened so far and replaces what is shown. Sections without history leave it as it is.
   * @param {Job} _job
   * @returns {Promise<void>}
   */
  async fetch(_job) {}

  /** Takes one event; the same event may come twice. @param {StreamedEvent} _event */
  take(_event) {}

  /** The job changed. @param {Job} _job */
  show(_job) {}

  /** @param {Job} job */
  async load(job) {
    const mine = ++this.loads;
    this.waiting = [];
    try {
      await this.fetch(job);
      if (mine === this.loads) fill(this.notice);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (mine === this.loads) this.failed(job, error);
    } finally {
      if (mine === this.loads) this.arrived();
    }
  }

  /** What happened so far is there: the section appears, once those above it have. */
  arrived() {
    this.replay();
    this.element.classList.remove("awaited");
  }

  replay() {
    const events = this.waiting ?? [];
    this.waiting = null;
    for (const event of events) this.take(event);
  }

  /** @param {StreamedEvent} event */
  receive(event) {
    if (this.waiting) this.waiting.push(event);
    else this.take(event);
  }

  /** @param {Job} job @param {Problem} error */
  failed(job, error) {
    const again = h("button", { class: "button small", type: "button" }, "Try again");
    again.addEventListener("click", () => void this.load(job));
    fill(this.notice, blank("This part could not be loaded", error.message, again));
  }

  /** @param {string} text */
  remark(text) {
    setText(this.note, text);
  }
}
