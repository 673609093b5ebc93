/** The list of jobs: filters in the address, one page at a time, changes as they happen. */

import { STATES, isTerminal, reduce } from "../lib/state.js";
import { Problem, call, callAt, items, jobPath } from "../ui/api.js";
import { byId, fill, h, keyed, setText } from "../ui/dom.js";
import { JobRow } from "../ui/jobrow.js";
import { blank, showConnection } from "../ui/status.js";
import { Stream } from "../ui/stream.js";

/** @typedef {import("../lib/types.js").Job} Job */

const POLL_MS = 3000;
const PAGE = 50;
const form = /** @type {HTMLFormElement} */ (byId("filters"));
const address = new URLSearchParams(location.search);

/** @type {Job[]} */
let jobs = [];
/** @type {string | null} */
let following = null;
/** @type {Stream | null} */
let stream = null;
/** @type {Map<string, {element: Element, update: (job: Job) => void}>} */
const rows = new Map();
let watched = "";
let turn = 0;

/** @param {string} name @param {string} all @param {string[]} values */
function options(name, all, values) {
  const select = /** @type {HTMLSelectElement} */ (form.elements.namedItem(name));
  select.append(h("option", { value: "" }, all), ...values.map((value) => h("option", { value }, value)));
  select.value = address.get(name) ?? "";
}

function showFilters() {
  options("kind", "All kinds", JSON.parse(form.dataset.kinds ?? "[]"));
  options("state", "All states", STATES);
  /** @type {HTMLInputElement} */ (byId("q")).value = address.get("q") ?? "";
  const label = address.get("label");
  if (!label) return;
  const drop = h("button", { class: "chip", type: "button", "aria-label": `Remove the filter ${label}` }, `${label}  ×`);
  drop.addEventListener("click", () => visit({ label: null }));
  fill(byId("label"), drop);
}

/** Goes to the list with these filters changed. @param {Record<string, string | null>} changes */
function visit(changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value) address.set(name, value);
    else address.delete(name);
  }
  if (!("cursor" in changes)) address.delete("cursor");
  location.assign(`/?${address}`);
}

/** Filters that only narrow the view replace the address, so that typing does not fill the history. */
function narrow() {
  for (const [name, value] of new FormData(form)) {
    if (value) address.set(name, String(value));
    else address.delete(name);
  }
  address.delete("cursor");
  history.replaceState(null, "", address.size ? `/?${address}` : "/");
  void refresh();
}

function query() {
  const wanted = new URLSearchParams({ limit: String(PAGE) });
  for (const name of ["kind", "state", "q", "label", "cursor"]) {
    const value = address.get(name);
    if (value) wanted.set(name, value);
  }
  return `/v1/jobs?${wanted}`;
}

async function refresh() {
  const mine = ++turn;
  try {
    const { body, after } = await callAt(query());
    if (mine !== turn) return;
    jobs = items(body);
    following = body.next_cursor ?? null;
    show();
    watch(after);
    if (!stream) showConnection("live");
  } catch (error) {
    if (mine === turn) failed(error);
  }
}

/** @param {unknown} error */
function failed(error) {
  showConnection("reconnecting");
  if (rows.size > 0 || (error instanceof Problem && error.status === 401)) return;
  const words = error instanceof Problem ? error.message : "The answer could not be read.";
  fill(byId("blank"), blank("The jobs cannot be shown", words));
  if (!(error instanceof Problem)) throw error;
}

function show() {
  keyed(byId("rows"), jobs, (job) => job.id, () => new JobRow(changed), rows);
  const table = /** @type {HTMLElement} */ (byId("rows").parentElement);
  table.hidden = jobs.length === 0;
  fill(byId("blank"), jobs.length === 0 && nothing());
  const older = byId("older");
  const newer = byId("newer");
  older.hidden = following === null;
  newer.hidden = !address.has("cursor");
  const active = jobs.filter((job) => !isTerminal(job.state)).length;
  setText(byId("summary"), jobs.length ? `${active} active on this page` : "");
}

function nothing() {
  const filtered = ["kind", "state", "q", "label"].some((name) => address.get(name));
  if (!filtered) return blank("No jobs yet", "Submit the first one with: trivet submit SPEC.yaml --watch");
  return blank("No job matches", "Change the filters, or clear them.", h("a", { class: "button", href: "/" }, "Clear filters"));
}

/** One job changed by the user or by an event. @param {Job} job */
function changed(job) {
  jobs = jobs.map((known) => (known.id === job.id ? job : known));
  show();
}

/** Follows the unfinished jobs on this page over one shared connection. @param {string} after */
function watch(after) {
  const ids = jobs.filter((job) => !isTerminal(job.state)).map((job) => job.id);
  if (ids.join() === watched) return;
  watched = ids.join();
  stream?.close();
  stream = null;
  if (ids.length === 0) return;
  const path = `/v1/events?types=state,progress&jobs=${ids.map(encodeURIComponent).join(",")}`;
  stream = new Stream((last) => `${path}&after=${encodeURIComponent(last ?? after)}`, {
    event: ({ job: id, event }) => void happened(id, event),
    state: (state) => showConnection(state === "reconnecting" ? state : "live"),
    gap: () => void refresh(),
  });
}

/** @param {string | null} id @param {import("../lib/types.js").JobEvent} event */
async function happened(id, event) {
  const job = jobs.find((known) => known.id === id);
  if (!job) return;
  changed(reduce(job, event));
  if (event.type === "state") changed(await call(jobPath(job.id)).catch(() => reduce(job, event)));
}

form.addEventListener("input", narrow);
form.addEventListener("submit", (event) => event.preventDefault());
byId("older").addEventListener("click", () => visit({ cursor: following }));
byId("newer").addEventListener("click", () => history.back());
window.setInterval(() => {
  if (!document.hidden) void refresh();
}, POLL_MS);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void refresh();
});
showFilters();
void refresh();
