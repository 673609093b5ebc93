/** Any set of jobs beside each other: their curves, what their specs differ in, what came of them. */

import { Curves } from "../compare/curves.js";
import { Instances } from "../compare/instances.js";
import { Plane } from "../compare/plane.js";
import { JobTable } from "../compare/table.js";
import { names } from "../lib/compare.js";
import { listPath } from "../lib/filters.js";
import { many, number } from "../lib/format.js";
import { isTerminal } from "../lib/state.js";
import { Problem, call } from "../ui/api.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { blank, later, showConnection } from "../ui/status.js";

/** @typedef {import("../lib/types.js").Job} Job */

const POLL_MS = 5000;
/** Jobs that one call names. */
const PAGE = 100;
const MOST = 1000;
/** What of the address says how the jobs are shown, and not which. */
const OWN = ["metric", "sort", "x", "y", "view"];

/** @type {Job[]} */
let jobs = [];
let isMore = false;
let isRevealed = false;

const given = () => new URLSearchParams(location.search);

/** @param {string} name @param {string} value */
function remember(name, value) {
  const wanted = given();
  wanted.set(name, value);
  history.replaceState(null, "", `/compare?${wanted}`);
}

const curves = new Curves((metric) => {
  remember("metric", metric);
  void draw();
}, () => list(), uncover);
const raise = (/** @type {string | null} */ name) => {
  curves.raise(name);
  plane.raise(name);
};
const plane = new Plane((name, value) => {
  remember(name, value);
  over();
}, raise);
const table = new JobTable(
  (sort) => {
    remember("sort", sort);
    list();
  },
  raise,
);
const instances = new Instances();

/** The jobs that the address names: by their ids, or by the filters of the list. @returns {Promise<Job[]>} */
async function fetched() {
  const ids = (given().get("ids") ?? "").split(",").filter(Boolean);
  /** @type {Job[]} */
  const found = [];
  if (!ids.length && ![...given().keys()].some((name) => !OWN.includes(name))) return found;
  const wanted = new URLSearchParams(location.search);
  for (const name of ["ids", "cursor", ...OWN]) wanted.delete(name);
  if (ids.length) {
    curves.expect(ids.slice(0, MOST), given().get("metric") ?? "");
    const path = (/** @type {string[]} */ some) => `/v1/jobs?ids=${some.map(encodeURIComponent).join(",")}&limit=${PAGE}&include=spec`;
    const pages = await Promise.all(chunks(ids.slice(0, MOST)).map((some) => call(path(some))));
    isMore = ids.length > MOST;
    return pages.flatMap((page) => page.items);
  }
  const path = `${listPath(wanted.toString(), MOST)}&include=spec`;
  let cursor = "";
  do {
    const page = await call(`${path}${cursor && `&cursor=${encodeURIComponent(cursor)}`}`);
    found.push(...page.items);
    cursor = page.next_cursor ?? "";
  } while (cursor && found.length < MOST);
  isMore = cursor !== "" || found.length > MOST;
  return found.slice(0, MOST);
}

/** @param {string[]} ids */
const chunks = (ids) => Array.from({ length: Math.ceil(ids.length / PAGE) }, (_, index) => ids.slice(index * PAGE, (index + 1) * PAGE));

/** Shows the curves in the place of what says that jobs are awaited. */
function uncover() {
  curves.element.classList.remove("awaited");
  fill(byId("blank"));
}

async function draw() {
  const words = names(jobs);
  setText(byId("summary"), `${many(jobs.length, "job")}${isMore ? `, the first ${number(MOST)}` : ""}`);
  byId("comparison").hidden = jobs.length === 0;
  if (isRevealed) list();
  const asked = instances.show(jobs, words);
  asked.catch(() => undefined);
  await curves.show(jobs, words, given().get("metric") ?? "");
  if (jobs.length) uncover();
  if (!isRevealed) await curves.painted();
  shown();
  await asked;
}

/** What is below the curves appears at once, so that none is pushed down by another. */
function reveal() {
  isRevealed = true;
  for (const part of parts) part.classList.remove("awaited");
  fill(byId("blank"), jobs.length === 0 && nothing());
}

const list = () => table.show(jobs, names(jobs), given().get("sort") ?? "", curves.drawn());

/** The jobs over their fields and results, as the address asks for. */
const over = () => plane.show(jobs, names(jobs), wantedView(), (job, name) => curves.series.get(`${job.id} ${name}`)?.value ?? []);

function wantedView() {
  const wanted = given();
  return { x: wanted.get("x") ?? "", y: wanted.get("y") ?? "", view: wanted.get("view") ?? "" };
}

function shown() {
  list();
  over();
}

const nothing = () => blank("Nothing to compare", "Select jobs in the list, then choose Compare.",
  h("a", { class: "button", href: "/" }, "Jobs"));

async function refresh() {
  try {
    jobs = await fetched();
    await draw();
    reveal();
    showConnection(jobs.every((job) => isTerminal(job.state)) ? "ended" : "live");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showConnection(error.passing ? "reconnecting" : "ended");
    if (jobs.length) reveal();
    else {
      byId("comparison").hidden = true;
      fill(byId("blank"), blank("The jobs cannot be shown", error.message));
    }
    if (error.passing) later(() => void refresh());
  }
}

const parts = [curves.element, plane.element, table.element, instances.element];
for (const part of parts) part.classList.add("awaited");
byId("comparison").append(...parts);
window.setInterval(() => {
  if (!document.hidden && jobs.some((job) => !isTerminal(job.state))) void refresh();
}, POLL_MS);
void refresh();
