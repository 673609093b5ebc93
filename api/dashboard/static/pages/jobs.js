/** The list of jobs: filters in the address, one page at a time, changes as they happen. */

import { columnsOf, isMeasure, measures, sortOf, sorted, withColumn, withSort } from "../lib/columns.js";
import { FIELDS, STATES_SHOWN, countsPath, isNarrowed, listPath, toggled } from "../lib/filters.js";
import { many, number } from "../lib/format.js";
import { table } from "../lib/series.js";
import { isTerminal, reduce } from "../lib/state.js";
import { BulkBar } from "../ui/bulk.js";
import { ColumnMenu } from "../ui/columnmenu.js";
import { Problem, call, callAt, items, jobPath } from "../ui/api.js";
import { byId, fill, h, keyed, setAttribute, setText } from "../ui/dom.js";
import { showHead } from "../ui/jobhead.js";
import { JobRow } from "../ui/jobrow.js";
import { maySubmit } from "../ui/me.js";
import { now } from "../ui/parts.js";
import { blank, poll, showConnection } from "../ui/status.js";
import { Stream } from "../ui/stream.js";

/** @typedef {import("../lib/types.js").Job} Job */

const POLL_MS = 3000;
const PAGE = 50;
/** Jobs that are fetched to be sorted: the service has them in orders of its own only. */
const SORTED = 1000;
/** How often the list and the curves of running jobs are fetched where that takes longer. */
const SLOW_POLL_MS = 12_000;
/** Running jobs of which the curve is drawn. */
const CURVES = 20;
const MAIN_METRIC = "loss";
/** Jobs of a sweep that are shown below it; its own page has all of them. */
const FOLDED = 200;
/** Jobs that one stream of events follows. */
const FOLLOWED = 100;
const form = /** @type {HTMLFormElement} */ (byId("filters"));
const all = /** @type {HTMLInputElement} */ (byId("all"));
const menu = new ColumnMenu(/** @type {HTMLDetailsElement} */ (byId("columns")), (name) => redo(withColumn(address(), name)));
const bulk = new BulkBar((left) => {
  keepSelected((id) => left.includes(id));
  void refresh();
});

/** @type {Job[]} */
let jobs = [];
/** The jobs of unfolded sweeps. @type {Map<string, Job[]>} */
const unfolded = new Map();
/** @type {Map<string, Job>} */
const selected = new Map();
/** Where the next page begins: a cursor, or in a sorted list the number of a job. @type {string | null} */
let following = null;
/** All jobs that are sorted, of which a page is shown. @type {Job[]} */
let fetched = [];
let fetchedAt = 0;
/** @type {Map<string, import("../lib/types.js").QueueLine>} */
let turns = new Map();
/** How the main metric of running jobs went. @type {Map<string, import("../lib/series.js").Series>} */
const curves = new Map();
let curvesAt = 0;
let headed = "";
/** @type {Stream | null} */
let stream = null;
/** @type {Map<string, JobRow>} */
const rows = new Map();
/** @type {Map<string, HTMLElement>} */
const chips = new Map();
let watched = "";
let turn = 0;

const address = () => location.search.slice(1);

/** Shows the same jobs in another way. @param {string} wanted */
function redo(wanted) {
  const isSorted = wanted !== address() && sortOf(wanted)?.by !== sortOf(address())?.by;
  history.replaceState(null, "", wanted ? `/?${wanted}` : "/");
  if (isSorted) fetchedAt = 0;
  void refresh();
}

/** Goes on with another address, which does not fill the history: typing must not. @param {string} wanted */
function narrow(wanted) {
  history.replaceState(null, "", wanted ? `/?${wanted}` : "/");
  fetchedAt = 0;
  keepSelected(() => false);
  showStates();
  void refresh();
}

/** @param {string} cursor */
function turnPage(cursor) {
  const wanted = new URLSearchParams(address());
  wanted.set(sortOf(address()) ? "from" : "cursor", cursor);
  location.assign(`/?${wanted}`);
}

/** To the page before, where that led here; else, as from a bookmark, to the first one. */
function goBack() {
  if (document.referrer.replace(/\?.*/, "") === `${location.origin}/`) return history.back();
  const wanted = new URLSearchParams(address());
  for (const name of ["cursor", "from"]) wanted.delete(name);
  location.assign(`/?${wanted}`);
}

/** @param {string} name */
const field = (name) => /** @type {HTMLInputElement | HTMLSelectElement} */ (form.elements.namedItem(name));

function showFilters() {
  const given = new URLSearchParams(address());
  /** @type {string[]} */
  const kinds = JSON.parse(form.dataset.kinds ?? "[]");
  field("kind").append(h("option", { value: "" }, "All kinds"), ...kinds.map((kind) => h("option", { value: kind }, kind)));
  for (const name of [...FIELDS, "order"]) field(name).value = given.get(name) ?? "";
  /** @type {HTMLInputElement} */ (field("sweep")).checked = given.get("sweep") === "all";
  for (const state of ["", ...STATES_SHOWN]) {
    const count = h("span", { class: "count" });
    const chip = h("button", { class: "chip", type: "button", "data-state": state }, state || "all", count);
    chip.addEventListener("click", () => narrow(toggled(address(), state)));
    chips.set(state, count);
    byId("states").append(chip);
  }
  const fold = byId("narrow");
  const isNarrow = isNarrowed(address());
  setAttribute(form, "data-open", isNarrow);
  setAttribute(fold, "aria-expanded", String(isNarrow));
  fold.addEventListener("click", () => {
    const isOpen = form.toggleAttribute("data-open");
    setAttribute(fold, "aria-expanded", String(isOpen));
  });
  showStates();
}

function showStates() {
  const wanted = new URLSearchParams(address()).getAll("state");
  for (const [state, count] of chips) {
    const isWanted = state ? wanted.includes(state) : wanted.length === 0;
    setAttribute(/** @type {Element} */ (count.parentElement), "aria-pressed", String(isWanted));
  }
}

function readFilters() {
  const wanted = new URLSearchParams(address());
  for (const name of [...FIELDS, "order"]) {
    if (field(name).value) wanted.set(name, field(name).value);
    else wanted.delete(name);
  }
  const sweeps = /** @type {HTMLInputElement} */ (field("sweep"));
  if (sweeps.checked) wanted.set("sweep", "all");
  else if (wanted.get("sweep") === "all") wanted.delete("sweep");
  for (const name of ["cursor", "from"]) wanted.delete(name);
  if (wanted.toString() !== address()) narrow(wanted.toString());
}

async function refresh() {
  const mine = ++turn;
  try {
    const asked = address();
    const [{ page, next, after }, counts] = await Promise.all([sortOf(asked) ? sortedPage(asked) : nextPage(asked), call(countsPath(asked))]);
    if (mine !== turn) return;
    const before = jobs;
    jobs = page;
    following = next;
    for (const job of jobs) if (unfolded.has(job.id) && hasMoved(job, before)) void unfold(job.id);
    showCounts(counts);
    show();
    watch(after);
    if (!stream) showConnection("live");
    await aside();
  } catch (error) {
    if (mine === turn) failed(error);
  }
}

/** A page in the service's own order. @param {string} asked */
async function nextPage(asked) {
  const { body, after } = await callAt(listPath(asked, PAGE));
  return { page: items(body), next: /** @type {string | null} */ (body.next_cursor ?? null), after };
}

/** A page of the jobs in another order, for which all of them are fetched, now and then. @param {string} asked */
async function sortedPage(asked) {
  const { body, after } = await callAt(listPath(asked, PAGE));
  if (Date.now() - fetchedAt > SLOW_POLL_MS || fetched.length <= PAGE) {
    fetched = items(body);
    for (let cursor = body.next_cursor; cursor && fetched.length < SORTED; ) {
      const wanted = new URLSearchParams(asked);
      wanted.set("cursor", cursor);
      const more = await call(listPath(wanted.toString(), SORTED - fetched.length));
      fetched.push(...items(more));
      cursor = more.next_cursor;
    }
    fetchedAt = Date.now();
  }
  const newer = new Map(jobs.map((job) => [job.id, job]));
  const all = sorted(fetched.map((job) => (isTerminal(job.state) ? job : (newer.get(job.id) ?? job))), asked, now());
  const from = Number(new URLSearchParams(asked).get("from") ?? 0);
  return { page: all.slice(from, from + PAGE), next: from + PAGE < all.length ? String(from + PAGE) : null, after };
}

/** Fetches what is shown beside the jobs: places in the queue, curves of those that run. */
async function aside() {
  const queued = listed().some((job) => job.state === "queued");
  turns = queued ? new Map(items(await call("/v1/queue?limit=1000")).map((line) => [line.job, line])) : new Map();
  const running = listed().filter((job) => job.state === "running" && job.kind === "train" && !job.children).slice(0, CURVES).map((job) => job.id);
  if (running.length && (running.some((id) => !curves.has(id)) || Date.now() - curvesAt > SLOW_POLL_MS)) {
    const found = await call(`/v1/jobs:metrics?ids=${running.map(encodeURIComponent).join(",")}&names=${MAIN_METRIC}&max_points=60`);
    for (const one of found.items) curves.set(one.job, table(one).get(MAIN_METRIC) ?? { step: [], time: [], value: [] });
    curvesAt = Date.now();
  }
  for (const [id, row] of rows) row.beside(turns.get(id), curves.get(id));
}

/** Whether jobs of a sweep changed since it was shown. @param {Job} sweep @param {Job[]} before */
function hasMoved(sweep, before) {
  const known = before.find((job) => job.id === sweep.id);
  return JSON.stringify(known?.children) !== JSON.stringify(sweep.children);
}

/** @param {unknown} error */
function failed(error) {
  if (!(error instanceof Problem)) throw error;
  showConnection(error.passing ? "reconnecting" : "ended");
  if (error.status === 401 || (error.passing && rows.size > 0)) return;
  jobs = [];
  following = null;
  show();
  const again = h("button", { class: "button", type: "button" }, "Try again");
  again.addEventListener("click", () => void refresh());
  fill(byId("blank"), blank("The jobs cannot be shown", error.message, error.passing ? again : clear()));
}

/** @param {{states: Record<string, number>, exact: boolean}} counts */
function showCounts({ states, exact }) {
  const total = Object.values(states).reduce((sum, count) => sum + count, 0);
  for (const [state, element] of chips) {
    const count = state ? (states[state] ?? 0) : total;
    setText(element, number(count));
    setAttribute(/** @type {Element} */ (element.parentElement), "data-none", count === 0);
  }
  setText(byId("summary"), exact ? many(total, "job") : `more than ${many(total, "job")}`);
}

/** The jobs of this page, with those of unfolded sweeps below their parents. */
const listed = () => jobs.flatMap((job) => [job, ...(unfolded.get(job.id) ?? [])]);

function show() {
  const shown = listed();
  for (const job of shown) if (selected.has(job.id)) selected.set(job.id, job);
  keyed(byId("rows"), shown, (job) => job.id, () => new JobRow({ selected: select, unfolded: fold }), rows);
  const columns = columnsOf(address());
  for (const [id, row] of rows) {
    row.lay(columns);
    row.mark(selected.has(id), unfolded.has(id));
    row.beside(turns.get(id), curves.get(id));
  }
  showColumns(columns);
  showNeeds(shown);
  all.checked = shown.length > 0 && shown.every((job) => selected.has(job.id));
  all.indeterminate = !all.checked && shown.some((job) => selected.has(job.id));
  bulk.show([...selected.values()]);
  /** @type {HTMLElement} */ (byId("rows").parentElement).hidden = shown.length === 0;
  fill(byId("blank"), shown.length === 0 && nothing());
  byId("following").hidden = following === null;
  byId("previous").hidden = !isLater();
}

/** Whether the page is not the first. */
function isLater() {
  const given = new URLSearchParams(address());
  return given.has("cursor") || Number(given.get("from") ?? 0) > 0;
}

/** A column that says the same of every job has less room, or none. @param {Job[]} shown */
function showNeeds(shown) {
  const table = /** @type {HTMLElement} */ (byId("head").closest("table"));
  setAttribute(table, "data-one-priority", shown.every((job) => job.priority === 0) && sortOf(address())?.by !== "priority");
  setAttribute(table, "data-projects", shown.some((job) => job.project !== "default"));
}

/** @param {string[]} columns */
function showColumns(columns) {
  const sort = sortOf(address());
  const head = JSON.stringify([columns, sort]);
  if (head !== headed) {
    headed = head;
    showHead(byId("head"), columns, sort, (by) => redo(withSort(address(), by)));
    const table = /** @type {HTMLElement} */ (byId("head").closest("table"));
    table.style.setProperty("--least", `${34 + 5 * columns.length + 2 * columns.filter(isMeasure).length}rem`);
  }
  menu.show(columns, measures(sort ? fetched : listed()));
}

const clear = () => h("a", { class: "button", href: "/" }, "Clear filters");

function nothing() {
  if (isLater()) {
    return blank("No more jobs", "Those that were here have moved on.", h("a", { class: "button", href: "/" }, "First page"));
  }
  if (isNarrowed(address())) return blank("No job matches", "Change the filters, or clear them.", clear());
  return blank("No jobs yet", "Submit the first one here, or with: trivet submit SPEC.yaml --watch",
    h("a", { class: "button", href: "/submit" }, "New job"));
}

/** @param {string} id @param {boolean} isSelected */
function select(id, isSelected) {
  const job = listed().find((known) => known.id === id);
  if (isSelected && job) selected.set(id, job);
  else selected.delete(id);
  show();
}

/** @param {(id: string) => boolean} isKept */
function keepSelected(isKept) {
  for (const id of [...selected.keys()]) if (!isKept(id)) selected.delete(id);
  show();
}

/** Shows or hides the jobs of a sweep. @param {string} id */
function fold(id) {
  if (unfolded.delete(id)) show();
  else void unfold(id);
}

/** @param {string} id */
async function unfold(id) {
  try {
    const page = await call(`/v1/jobs?sweep=${encodeURIComponent(id)}&order=active&limit=${FOLDED}`);
    unfolded.set(id, items(page));
    show();
  } catch (error) {
    failed(error);
  }
}

/** One job changed by the user or by an event. @param {Job} job */
function changed(job) {
  const replaced = (/** @type {Job[]} */ known) => known.map((one) => (one.id === job.id ? job : one));
  jobs = replaced(jobs);
  for (const [sweep, known] of unfolded) unfolded.set(sweep, replaced(known));
  show();
}

/** Follows the unfinished jobs on this page over one shared connection. @param {string} after */
function watch(after) {
  const ids = listed().filter((job) => !isTerminal(job.state)).slice(0, FOLLOWED).map((job) => job.id);
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
  const job = listed().find((known) => known.id === id);
  if (!job) return;
  changed(reduce(job, event));
  if (event.type === "state") changed(await call(jobPath(job.id)).catch(() => reduce(job, event)));
}

// A part of a name finds nothing where a whole one is asked for: only the search follows each letter.
form.addEventListener("input", ({ target }) => {
  if (target === field("q") || target instanceof HTMLSelectElement) readFilters();
});
form.addEventListener("change", readFilters);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  readFilters();
});
all.addEventListener("change", () => {
  for (const job of listed()) {
    if (all.checked) selected.set(job.id, job);
    else selected.delete(job.id);
  }
  show();
});
byId("following").addEventListener("click", () => following && turnPage(following));
byId("previous").addEventListener("click", goBack);
byId("bulk").append(bulk.element);
// A list that is seen again is fetched, and its stream begins there: what was missed is not played over it.
document.addEventListener("visibilitychange", () => {
  stream?.close();
  stream = null;
  watched = "";
  if (!document.hidden) void refresh().then(() => [...unfolded.keys()].forEach((id) => void unfold(id)));
});
showFilters();
void maySubmit().then((may) => {
  byId("new").hidden = !may;
  bulk.allow(may);
});
poll(refresh, POLL_MS);
