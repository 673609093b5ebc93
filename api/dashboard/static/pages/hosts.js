/** Worker hosts: what devices they have, what runs on them, and taking them out of service. */

import { ago, span, unix } from "../lib/format.js";
import { reach } from "../lib/gantt.js";
import { rowsOf } from "../lib/ran.js";
import { timeTicks } from "../lib/scales.js";
import { STATES, title } from "../lib/state.js";
import { Problem, call, items, jobPath, post } from "../ui/api.js";
import { confirmed } from "../ui/confirm.js";
import { byId, fill, h, keyed, setAttribute, setText } from "../ui/dom.js";
import { Gantt, key } from "../ui/gantt.js";
import { keepCounting, now, stateMark, updateStateMark } from "../ui/parts.js";
import { blank, notify, showConnection } from "../ui/status.js";

/** @typedef {import("../lib/types.js").Host} Host */
/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {{name: string, state: string, labels: Record<string, string>, meaning: string, action: string}} Alert */
/** @typedef {{pool: string, index: number, model: string, free: boolean, lost: boolean, job: Job | null}} Device */

const POLL_MS = 2500;
const ALERTS_MS = 15_000;
/** Jobs whose devices and times are drawn, the newest of all. */
const DRAWN = 200;
/** A thousand jobs may wait, which are newer than all that ran. */
const HAVE_RUN = STATES.filter((state) => state !== "queued").map((state) => `&state=${state}`).join("");
/** @type {Map<string, {element: Element, update: (host: Host) => void}>} */
const cards = new Map();
/** @type {Map<string, Job>} */
let jobs = new Map();
/** What has run lately. @type {Job[]} */
let ran = [];
/** Whether the session's key is an operator's, who alone drains hosts and is told of alerts. */
let operator = false;

/** Every device of a host with the job that holds it. @param {Host} host @returns {Device[]} */
function devices(host) {
  const pools = { cuda: host.cuda, cpu: Array.from({ length: host.cpu_slots }, () => "CPU slot") };
  return Object.entries(pools).flatMap(([pool, models]) =>
    models.map((model, index) => {
      const holding = host.held.find((one) => one.pool === pool && one.devices.includes(index));
      const free = host.free[pool]?.includes(index) ?? false;
      return { pool, index, model, free, lost: holding?.lost ?? false, job: (holding?.job && jobs.get(holding.job)) || null };
    }),
  );
}

/** Why a host gets no work for a while. @param {Host} host */
function failure(host) {
  if (!host.failing) return "";
  const { reason, since, retry_in_s: seconds } = host.failing;
  const again = seconds > 0 ? `It is tried again in ${Math.ceil(seconds)} s with one job.` : "It is being tried with one job.";
  return `No work since ${ago(unix(since) ?? 0, now())}: ${reason}. ${again}`;
}

/** Whose threads are too many for a host. @param {Host} host */
function load(host) {
  if (!host.overcommitted) return "";
  const { load, cores, by } = host.overcommitted;
  const users = by.map(({ job, program, threads }) => `${(job && jobs.get(job)?.name) || job || program || "another job"} ${threads}`);
  return `Overcommitted: ${load} threads on average compete for its ${cores} cores${users.length ? `; now ${users.join(", ")}` : ""}.`;
}

/** What a scheduler gave the host for one job, or what schedulers its worker asks. @param {Host} host */
function launchers(host) {
  const given = host.allocation;
  if (given) return `${given.devices} ${given.pool} devices of ${given.launcher} ${given.id}, for one job`;
  return Object.entries(host.launchers).map(([name, has]) => `Launcher ${name}: ${has}`).join(" · ");
}

class HostCard {
  constructor() {
    this.name = h("h2", {});
    this.address = h("span", { class: "code muted" });
    this.state = stateMark("alive");
    this.seen = h("span", { class: "note" });
    this.action = h("button", { class: "button small", type: "button" });
    this.grid = h("div", {});
    this.versions = h("p", { class: "versions muted" });
    this.failing = h("p", { class: "failing" });
    this.load = h("p", { class: "overcommitted note" });
    this.launchers = h("p", { class: "launchers note" });
    this.gantt = new Gantt("What ran here", (seconds) => (seconds === 0 ? "now" : `${span(-seconds)} ago`), timeTicks);
    this.legend = h("div", {});
    this.ran = h("details", { class: "ran" }, h("summary", {}, "What ran here"), this.legend, this.gantt.element);
    this.ran.addEventListener("toggle", () => this.showRan());
    /** @type {Host | null} */
    this.host = null;
    this.shown = "";
    this.kinds = "";
    this.action.addEventListener("click", () => void this.toggle());
    this.element = h("section", { class: "panel host" },
      h("header", {}, this.name, this.address, h("span", { class: "aside" }, this.state, this.seen, this.action)),
      this.failing, this.load, this.launchers, this.grid, this.ran, this.versions);
  }

  /** @param {Host} host */
  update(host) {
    this.host = host;
    setAttribute(this.element, "data-host", host.name);
    setText(this.name, host.name);
    setText(this.address, host.address);
    const state = host.draining ? "draining" : host.failing ? "failing" : "alive";
    updateStateMark(this.state, host.alive ? state : "lost");
    setText(this.failing, failure(host));
    setAttribute(this.failing, "hidden", host.failing === null);
    setText(this.load, load(host));
    setAttribute(this.load, "hidden", host.overcommitted === null);
    setText(this.launchers, launchers(host));
    setAttribute(this.launchers, "hidden", launchers(host) === "");
    keepCounting(this.seen, () => `seen ${ago(unix(host.seen_at) ?? 0, now())}`);
    setText(this.action, host.draining || host.failing ? "Resume" : "Drain");
    setAttribute(this.action, "hidden", !operator || host.allocation !== null);
    this.showDevices(devices(host));
    this.showRan();
    const versions = Object.entries(host.versions).map(([name, version]) => `${name} ${version}`);
    const isolation = host.isolation.length > 0 ? [`ranks isolated by ${host.isolation.join(", ")}`] : [];
    setText(this.versions, [...versions, ...isolation].join("  ·  "));
  }

  /** Drawn again only when something changed, so that the keyboard's focus stays. @param {Device[]} all */
  showDevices(all) {
    const signature = JSON.stringify(all.map((device) => [device.pool, device.free, device.lost, device.job?.id, device.job?.name]));
    if (signature === this.shown) return;
    this.shown = signature;
    fill(this.grid, ...["cuda", "cpu"].map((pool) => this.pool(pool, all.filter((device) => device.pool === pool))));
  }

  /** @param {string} pool @param {Device[]} all */
  pool(pool, all) {
    if (all.length === 0) return null;
    const busy = all.filter((device) => !device.free).length;
    return h("div", { class: "pool" },
      h("h3", {}, pool === "cuda" ? (all[0]?.model ?? "CUDA") : "CPU slots", h("span", { class: "muted" }, ` ${busy} of ${all.length} busy`)),
      h("ul", { class: "devices" }, ...all.map(deviceCell)));
  }

  /** Which jobs had which device when, for those who ask. */
  showRan() {
    const rows = this.host ? rowsOf(ran, this.host.name, now()) : [];
    this.ran.hidden = rows.length === 0;
    if (!this.ran.open) return;
    const kinds = [...new Set(rows.flatMap(({ lanes }) => lanes.flat().map(({ tone }) => tone)))].sort();
    if (kinds.join() !== this.kinds) fill(this.legend, key(kinds));
    this.kinds = kinds.join();
    this.gantt.set(rows, [Math.min(reach(rows)?.[0] ?? 0, -1), 0]);
  }

  async toggle() {
    const host = this.host;
    if (!host) return;
    const stopped = host.draining || host.failing !== null;
    const sure = stopped || (await confirmed(`Drain ${host.name}?`,
      "Jobs that are running there will finish; no new ones are placed there until the host is resumed.", "Drain the host"));
    if (!sure) return;
    try {
      await post(`/v1/hosts/${encodeURIComponent(host.name)}/${stopped ? "resume" : "drain"}`);
      await refresh();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      notify(error.message, "error");
    }
  }
}

/** @param {Device} device */
function deviceCell(device) {
  const holder = device.job ? title(device.job) : "held";
  const words = device.free ? "free" : device.lost ? `lost: ${holder}` : holder;
  const why = device.lost ? "; held until the host confirms that the lost attempt's processes are gone" : "";
  const label = `${device.model} ${device.index}: ${words}${why}`;
  const inside = [h("span", { class: "index" }, device.index), h("span", { class: "holder" }, words)];
  const cell = device.job
    ? h("a", { class: "device", href: `/jobs/${encodeURIComponent(device.job.id)}`, title: label }, ...inside)
    : h("span", { class: "device", title: label }, ...inside);
  setAttribute(cell, "data-free", String(device.free));
  setAttribute(cell, "data-lost", device.lost);
  return h("li", {}, cell);
}

/** The jobs that hold devices, each fetched once a round. @param {Host[]} hosts */
async function holders(hosts) {
  const ids = [...new Set(hosts.flatMap((host) => host.running))];
  const found = await Promise.all(ids.map((id) => call(jobPath(id)).catch(() => jobs.get(id) ?? null)));
  return new Map(found.filter(Boolean).map((job) => [job.id, job]));
}

async function refresh() {
  try {
    const hosts = /** @type {Host[]} */ (items(await call("/v1/hosts")));
    jobs = await holders(hosts);
    keyed(byId("hosts"), hosts, (host) => host.name, () => new HostCard(), cards);
    fill(byId("blank"), hosts.length === 0 &&
      blank("No hosts", "A worker shows up here when it starts: run trivet worker on a machine with devices."));
    setText(byId("summary"), summary(hosts));
    showConnection("live");
  } catch (error) {
    showConnection("reconnecting");
    if (!(error instanceof Problem)) throw error;
    if (cards.size === 0) fill(byId("blank"), blank("The hosts cannot be shown", error.message));
  }
}

/** @param {Host[]} hosts */
function summary(hosts) {
  if (hosts.length === 0) return "";
  const all = hosts.filter((host) => host.alive).flatMap(devices);
  const free = all.filter((device) => device.free).length;
  return `${all.length - free} of ${all.length} devices busy`;
}

/** What fires, for those who may know: the service's numbers are an operator's. */
async function refreshAlerts() {
  if (!operator) return;
  try {
    const alerts = /** @type {Alert[]} */ (items(await call("/v1/alerts"))).filter((alert) => alert.state === "firing");
    setText(byId("alerts"), alerts.map(alertLine).join(" "));
    setAttribute(byId("alerts"), "hidden", alerts.length === 0);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    setAttribute(byId("alerts"), "hidden", true);
  }
}

async function refreshRan() {
  ran = await call(`/v1/jobs?limit=${DRAWN}${HAVE_RUN}`).then(items, () => ran);
  for (const card of cards.values()) /** @type {HostCard} */ (card).showRan();
}

/** @param {Alert} alert */
function alertLine(alert) {
  const about = Object.values(alert.labels).join(", ");
  return `${about ? `${about}: ` : ""}${alert.meaning} ${alert.action}`;
}

window.setInterval(() => {
  if (!document.hidden) void Promise.all([refreshAlerts(), refreshRan()]);
}, ALERTS_MS);
window.setInterval(() => {
  if (!document.hidden) void refresh();
}, POLL_MS);

async function start() {
  operator = await call("/v1/me").then((me) => me.operator, () => false);
  await Promise.all([refresh(), refreshAlerts()]);
  await refreshRan();
}
void start();
