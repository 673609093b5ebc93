/** One job: sections chosen by its kind, one live connection that feeds them all. */

import { Artifacts } from "../job/artifacts.js";
import { Attempts } from "../job/attempts.js";
import { Details } from "../job/details.js";
import { Figures } from "../job/figures.js";
import { Header } from "../job/header.js";
import { History } from "../job/history.js";
import { Log } from "../job/log.js";
import { Metrics } from "../job/metrics.js";
import { Notices } from "../job/notices.js";
import { Spec } from "../job/spec.js";
import { Sweep } from "../job/sweep.js";
import { isTerminal, reduce } from "../lib/state.js";
import { Problem, call, jobPath } from "../ui/api.js";
import { byId, fill, h, oncePerFrame } from "../ui/dom.js";
import { blank, showConnection } from "../ui/status.js";
import { Stream } from "../ui/stream.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../job/section.js").Section} Section */

const RETRY_MS = 2000;
/** How often a queued job is asked why it waits: that changes with the hosts, of which its events do not tell. */
const QUEUED_POLL_MS = 5000;
/** How often a page that nobody sees asks for the job: it has no stream, and its title is read all the same. */
const UNSEEN_POLL_MS = 30_000;

const place = byId("job");
const id = place.dataset.job ?? "";
/** Kinds that bring a module for the middle of the page. @type {string[]} */
const kindsWithPage = JSON.parse(place.dataset.kinds ?? "[]");

/** What the middle of the page shows: the jobs of a sweep, else by the job's kind. @param {Job} job @returns {Promise<Section[]>} */
async function sectionsOf({ kind, children }) {
  if (children) return [new Sweep(kind === "chain" ? kind : "sweep")];
  if (kindsWithPage.includes(kind)) {
    try {
      return (await import(`../kinds/${encodeURIComponent(kind)}.js`)).sections();
    } catch (error) {
      reportError(error);
    }
  }
  return [new Figures(), new Metrics(true)];
}

class JobPage {
  /** @param {Job} job @param {Section[]} middle */
  constructor(job, middle) {
    this.job = job;
    this.header = new Header((changed) => this.acted(changed));
    this.main = [...middle, ...(job.children ? [] : [new Attempts(), new Log(), new Artifacts()])];
    this.side = [new Details(), new History(), new Notices(), new Spec()];
    this.sections = [...this.main, ...this.side];
    /** @type {Stream | null} */
    this.stream = null;
    this.fresh = 0;
    this.beginning = false;
    this.draw = oncePerFrame(() => this.show());
    fill(place, this.header.element, h("div", { class: "columns" },
      h("div", { class: "stack" }, ...this.main.map((section) => section.element)),
      h("aside", { class: "stack", "aria-label": "About this job" }, ...this.side.map((section) => section.element))));
    this.show();
    void this.begin();
    window.setInterval(() => {
      if (this.job.state === "queued" && !document.hidden) void this.refresh();
    }, QUEUED_POLL_MS);
    window.setInterval(() => void this.refreshUnseen(), UNSEEN_POLL_MS);
  }

  /**
   * First where the stream goes on, then every snapshot, the job's own too: what falls in between arrives twice and
   * is taken once, and nothing is missed.
   */
  async begin() {
    if (this.beginning) return;
    this.beginning = true;
    if (isTerminal(this.job.state)) {
      showConnection("ended");
      this.beginning = false;
      return void (await this.reload());
    }
    const { after } = await call(jobPath(id, "/metrics?names=-")).catch(() => ({ after: null }));
    this.connect(after);
    this.beginning = false;
    await Promise.all([this.refresh(), this.reload()]);
  }

  async reload() {
    await Promise.all(this.sections.map((section) => section.load(this.job)));
  }

  /** @param {string | null} after */
  connect(after) {
    this.stream?.close();
    const types = "state,metric,bound,search,span,log,artifact,progress,phase";
    const url = (/** @type {string | null} */ last) =>
      jobPath(id, `/events?types=${types}&after=${encodeURIComponent(last ?? after ?? "0-0")}`);
    this.stream = new Stream(url, {
      event: (streamed) => this.take(streamed),
      state: (state) => {
        showConnection(state);
        if (state === "ended") void this.ended();
      },
      gap: () => void Promise.all([this.refresh(), this.reload()]),
    });
  }

  async ended() {
    this.stream = null;
    await this.refresh();
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take(streamed) {
    for (const section of this.sections) section.receive(streamed);
    const reduced = reduce(this.job, streamed.event);
    if (reduced === this.job) return;
    this.job = reduced;
    this.draw();
    if (streamed.event.type === "state") void this.refresh();
  }

  /** State events tell little: times, placement, result and error come with the job itself. */
  async refresh() {
    const mine = ++this.fresh;
    const job = await call(jobPath(id)).catch(() => null);
    if (job && mine === this.fresh) this.set(job);
    if (job?.state === "queued") await this.askTurn();
  }

  /** A page that nobody sees has no frames to draw in: its title is written at once. */
  async refreshUnseen() {
    if (!document.hidden || isTerminal(this.job.state)) return;
    await this.refresh();
    this.header.show(this.job);
  }

  async askTurn() {
    const page = await call(`/v1/queue?job=${encodeURIComponent(id)}`).catch(() => null);
    if (page) this.header.showTurn(page.items[0] ?? null);
  }

  /** What an action answered is newer than any refresh that is under way. @param {Job} job */
  acted(job) {
    this.fresh += 1;
    this.set(job);
  }

  /** @param {Job} job */
  set(job) {
    this.job = job;
    this.draw();
    if (!this.stream && !isTerminal(job.state)) void this.begin();
  }

  show() {
    this.header.show(this.job);
    for (const section of this.sections) section.show(this.job);
  }
}

async function start() {
  try {
    const job = await call(jobPath(id));
    new JobPage(job, await sectionsOf(job));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.passing) {
      showConnection("reconnecting");
      window.setTimeout(() => void start(), RETRY_MS);
    }
    const words = error.status === 404 ? "No such job" : "The job cannot be shown";
    fill(place, blank(words, error.message, h("a", { class: "button", href: "/" }, "All jobs")));
  }
}

void start();
