/** A new job: a form and its YAML side by side, checked as a submission would be while it is written. */

import { about, first, withFile } from "../lib/drafts.js";
import { many, number, percent } from "../lib/format.js";
import { reach } from "../lib/gantt.js";
import { plannedRows, tones } from "../lib/plan.js";
import { tickLabel } from "../lib/scales.js";
import { COMMON, changed, fieldsOf, withoutDefaults } from "../lib/schema.js";
import { lines, text as written } from "../lib/spec.js";
import { title } from "../lib/state.js";
import { Problem, call, items, jobPath, send, upload } from "../ui/api.js";
import { byId, fill, h, setAttribute, setText } from "../ui/dom.js";
import { Gantt, key } from "../ui/gantt.js";
import { part } from "../ui/specform.js";
import { blank, later, notify, showConnection } from "../ui/status.js";

/** @typedef {import("../lib/schema.js").Schema} Schema */
/** @typedef {import("../lib/drafts.js").Spec} Spec */
/** @typedef {{path: string, message: string, expected: string, line?: number | null}} DraftError */

const PAUSE_MS = 350;

const area = /** @type {HTMLTextAreaElement} */ (byId("text"));
const button = /** @type {HTMLButtonElement} */ (byId("submit"));
const verdict = byId("verdict");
/** @type {string[]} */
const kinds = JSON.parse(byId("kinds").dataset.kinds ?? "[]");
/** @type {Map<string, Schema>} */
const schemas = new Map();
/** What was written of each kind before another was chosen. @type {Map<string, string>} */
const left = new Map();
/** @type {{name: string, part: import("../ui/specform.js").Part}[]} */
let parts = [];
/** @type {Map<string, HTMLElement>} */
const kindButtons = new Map();
/** @type {Spec} */
let spec = {};
let kind = "";
/** What a submission would send: the checked text as JSON; null where it was refused or is not checked. @type {string | null} */
let body = null;
/** One for each text, so that no text is submitted twice. */
let once = "";
let turn = 0;
let timer = 0;

/** @param {string} wanted @returns {Promise<Schema>} */
async function schemaOf(wanted) {
  const known = schemas.get(wanted) ?? (await call(`/v1/kinds/${encodeURIComponent(wanted)}/schema`));
  schemas.set(wanted, known);
  return known;
}

/** The form of a kind. @param {string} wanted */
async function shape(wanted) {
  if (wanted === kind || !kinds.includes(wanted)) return;
  const schema = await schemaOf(wanted);
  kind = wanted;
  for (const [name, each] of kindButtons) setAttribute(each, "aria-pressed", String(name === kind));
  const fields = fieldsOf(schema).filter((field) => field.name !== "kind");
  const own = fields.filter((field) => !COMMON.has(field.name)).sort((one, other) => order(one) - order(other));
  const made = (/** @type {import("../lib/schema.js").Field[]} */ some) =>
    some.map((field) => ({ name: field.name, part: part(field, schema, { changed: edit, dropped: (file, path) => void give(file, path) }) }));
  const [main, common] = [made(own), made(fields.filter((field) => COMMON.has(field.name)))];
  parts = [...main, ...common];
  fill(byId("form"),
    h("section", { class: "panel", "aria-label": "What it does" }, h("div", { class: "fields" }, ...main.map((one) => one.part.element))),
    h("details", { class: "panel" }, h("summary", {}, "How it runs"), h("div", { class: "fields" }, ...common.map((one) => one.part.element))));
  byId("form").classList.remove("awaited");
}

/** Names first, then what is needed, then what may be folded. @param {import("../lib/schema.js").Field} field */
const order = (field) => (field.name === "name" ? 0 : field.required ? 1 : field.type === "group" || field.type === "union" ? 3 : 2);

/** The user changed a field. @param {string} path @param {unknown} value */
function edit(path, value) {
  write(changed(spec, path, value));
}

/** @param {Spec} wanted */
function write(wanted) {
  spec = wanted;
  area.value = written(lines(wanted));
  show([]);
  soon();
}

/** @param {DraftError[]} errors */
function show(errors) {
  const byPath = new Map(errors.map((error) => [error.path, `${error.message} (expected ${error.expected})`]));
  for (const one of parts) one.part.show(spec[one.name], byPath);
}

/** The text changed: it is checked once nothing was typed for a moment. */
function soon() {
  sessionStorage.setItem("trivet-draft", area.value);
  turn += 1;
  body = null;
  button.disabled = true;
  setText(verdict, "Checking…");
  setAttribute(verdict, "data-tone", null);
  window.clearTimeout(timer);
  timer = window.setTimeout(() => void check(), PAUSE_MS);
}

async function check() {
  const mine = turn;
  try {
    const told = await send("/v1/jobs:check", { text: area.value });
    if (mine !== turn) return;
    showConnection("live");
    if (told.spec !== null && typeof told.spec === "object" && !Array.isArray(told.spec)) {
      spec = told.spec;
      await shape(String(spec.kind));
    }
    if (!kind) await shape(kinds[0] ?? "");
    show(told.errors);
    body = told.errors.length ? null : told.body;
    once = crypto.getRandomValues(new Uint32Array(4)).join("-");
    button.disabled = body === null;
    if (told.errors.length) refuse(told.errors);
    else accept(told);
    draw(told.plan);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (mine !== turn) return;
    showConnection(error.passing ? "reconnecting" : "live");
    if (error.passing) later(() => void (mine === turn && check()));
    refuse(error.errors.length ? error.errors : [{ path: "", message: error.message, expected: "" }]);
  } finally {
    byId("form").classList.remove("awaited");
  }
}

/** @param {{jobs: number, ranks: number}} told */
function accept({ jobs, ranks }) {
  setAttribute(verdict, "data-tone", "good");
  setText(verdict, `It would be accepted: ${many(jobs, "job")} on ${many(ranks, "device")}${jobs > 1 ? " each" : ""}.`);
}

/** @param {DraftError[]} errors */
function refuse(errors) {
  setAttribute(verdict, "data-tone", "bad");
  fill(verdict, h("p", {}, `It would be refused, for ${many(errors.length, "reason")}:`), h("ul", {}, ...errors.map((error) => {
    const expected = error.expected ? ` Expected ${error.expected}.` : "";
    const place = error.line ? `line ${error.line}` : "";
    const go = h("button", { class: "tiny", type: "button", "aria-label": `Go to ${place}` }, place);
    go.addEventListener("click", () => goTo(error.line ?? 1));
    return h("li", {}, place && go, error.path && h("span", { class: "code" }, error.path), `${error.message}${/[.?!]$/.test(error.message) ? "" : "."}${expected}`);
  })));
}

/** @param {number} line */
function goTo(line) {
  const before = area.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  area.focus();
  area.setSelectionRange(before, before + (area.value.split("\n")[line - 1] ?? "").length);
}

/** @param {import("../lib/plan.js").Plan | null} plan */
function draw(plan) {
  const place = byId("plan");
  place.hidden = !plan;
  if (!plan) return;
  const gantt = new Gantt("Planned schedule", tickLabel);
  const rows = plannedRows(plan);
  fill(place, h("header", {}, h("h2", {}, "Pipeline schedule"), h("span", { class: "note" },
    `${plan.schedule} · ${many(plan.micro_batches, "micro-batch", "micro-batches")} · ranks wait ${percent(plan.bubble, 1)} of the time, predicted`)),
  key(tones(plan)), gantt.element);
  gantt.set(rows, reach(rows));
}

/** Uploads a file to the field that names it, or to where its name says that it belongs. @param {File} file @param {string} [path] */
async function give(file, path) {
  setText(verdict, `Uploading ${file.name} (${number(file.size)} bytes)…`);
  try {
    const { id } = await upload(file);
    const placed = path ? changed(spec, path, id) : withFile(spec, file.name, id);
    if (!placed) return void notify(`${file.name} is stored as ${id}; name it in the spec where it belongs.`);
    await shape(String(placed.kind));
    write(placed);
    notify(`${file.name} is uploaded.`);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    notify(error.message, "error");
    soon();
  }
}

async function submit() {
  if (body === null) return;
  button.disabled = true;
  try {
    const job = await send("/v1/jobs", body, { "Idempotency-Key": once });
    sessionStorage.removeItem("trivet-draft");
    location.assign(`/jobs/${encodeURIComponent(job.id)}`);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    refuse(error.errors.length ? error.errors : [{ path: "", message: error.message, expected: "" }]);
    button.disabled = false;
  }
}

/** @param {string} wanted */
async function choose(wanted) {
  if (kind) left.set(kind, area.value);
  await shape(wanted);
  const known = left.get(wanted);
  if (known === undefined) return write(first(wanted));
  area.value = known;
  soon();
}

/** What the address asks for: another job again, something about its model, a kind; else what was left here. */
async function draft() {
  const given = new URLSearchParams(location.search);
  const [again, model, wanted] = [given.get("from"), given.get("model"), given.get("kind")];
  if (again) {
    const job = await call(jobPath(again));
    return withoutDefaults(job.spec, await schemaOf(job.kind));
  }
  if (model && wanted) return about(wanted, await call(jobPath(model)));
  return wanted ? first(wanted) : null;
}

/** Ids that fields suggest. */
async function suggest() {
  const [jobs, files] = await Promise.all(["/v1/jobs?limit=50", "/v1/files?limit=50"].map((path) => call(path).catch(() => null)));
  byId("form").after(
    h("datalist", { id: "jobs-known" }, ...items(jobs).map((job) => h("option", { value: job.id, label: `${title(job)} · ${job.kind} · ${job.state}` }))),
    h("datalist", { id: "files-known" }, ...items(files).map((file) => h("option", { value: file.id, label: file.name }))));
}

async function start() {
  try {
    const wanted = await draft();
    const kept = sessionStorage.getItem("trivet-draft");
    if (wanted || kept === null) {
      const beginning = wanted ?? first(kinds.includes("train") ? "train" : (kinds[0] ?? ""));
      await shape(String(beginning.kind));
      write(beginning);
    } else {
      area.value = kept;
      soon();
    }
    await suggest();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.passing) later(() => void start());
    byId("form").classList.remove("awaited");
    fill(byId("form"), blank("The form cannot be shown", error.message, h("a", { class: "button", href: "/" }, "All jobs")));
  }
}

for (const name of kinds) {
  const each = h("button", { class: "tiny", type: "button", "aria-pressed": "false" }, name);
  each.addEventListener("click", () => void choose(name));
  kindButtons.set(name, each);
  byId("kinds").append(each);
}
area.addEventListener("input", soon);
button.addEventListener("click", () => void submit());
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const path = event.target instanceof Element ? event.target.closest(".field")?.querySelector(".upload") && event.target.closest(".field")?.getAttribute("data-path") : null;
  void (async () => {
    for (const file of event.dataTransfer?.files ?? []) await give(file, path ?? undefined);
  })();
});
void start();
