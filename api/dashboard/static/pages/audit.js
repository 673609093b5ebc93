/** The audit log, for operators: who did what, newest first. */

import { dateTime, number, unix } from "../lib/format.js";
import { call, items } from "../ui/api.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { withHeadings } from "../ui/parts.js";
import { blank, present } from "../ui/status.js";

/**
 * @typedef {{number: number, time: string, action: string, actor: string, address: string, job: string | null,
 *   subject: string | null, detail: Record<string, string>}} Entry
 */

const PAGE = 100;
/** Characters of what an entry is about: the ids of files have more. */
const LONGEST = 40;
const FIELDS = ["actor", "action", "job"];
const form = /** @type {HTMLFormElement} */ (byId("filters"));
const more = byId("more");
/** @type {Entry[]} */
let entries = [];
let turn = 0;

/** @param {string} name */
const field = (name) => /** @type {HTMLInputElement | HTMLSelectElement} */ (form.elements.namedItem(name));

/** What the fields ask for, as words of an address. */
function asked() {
  const wanted = new URLSearchParams();
  for (const name of FIELDS) if (field(name).value.trim()) wanted.set(name, field(name).value.trim());
  return wanted;
}

/** @param {string} [cursor] */
async function load(cursor = "") {
  const mine = ++turn;
  const wanted = asked();
  history.replaceState(null, "", wanted.size ? `/audit?${wanted}` : "/audit");
  await present("The audit log cannot be shown", async () => {
    const page = await call(`/v1/audit?limit=${PAGE}&${wanted}${cursor && `&cursor=${encodeURIComponent(cursor)}`}`);
    if (mine !== turn) return;
    entries = cursor ? [...entries, ...items(page)] : items(page);
    setText(byId("summary"), page.head.number ? `newest is no. ${number(page.head.number)}` : "");
    more.hidden = !page.next_cursor;
    more.onclick = () => void load(page.next_cursor);
    fill(byId("rows"), ...entries.map(row));
    withHeadings(/** @type {HTMLTableElement} */ (byId("rows").parentElement));
    fill(byId("blank"), entries.length === 0 && blank("No entries", wanted.size ? "Nobody did such a thing." : "What people do is noted here."));
  }, { refused: () => fill(byId("rows")) });
}

/** @param {Entry} entry */
function row({ number: place, time, action, actor, address, job, subject, detail }) {
  const about = job === null ? subject && h("span", { title: subject }, subject.length > LONGEST ? `${subject.slice(0, LONGEST)}…` : subject) : h("a", { href: `/jobs/${encodeURIComponent(job)}`, class: "code" }, job);
  const words = Object.entries(detail).map(([name, value]) => `${name} ${value}`).join(", ");
  return h("tr", { "data-entry": place }, h("td", { class: "muted" }, dateTime(unix(time))), h("td", { class: "who" }, actor || h("span", { class: "muted" }, "no valid key")),
    h("td", {}, action), h("td", { class: "about" }, (about || words) && h("span", {}, about, words && h("span", { class: "muted" }, ` ${words}`))), h("td", { class: "muted" }, address || "this machine"));
}

const given = new URLSearchParams(location.search);
field("action").append(...JSON.parse(form.dataset.actions ?? "[]").map((/** @type {string} */ action) => h("option", { value: action }, action)));
for (const name of FIELDS) field(name).value = given.get(name) ?? "";
form.addEventListener("change", () => void load());
form.addEventListener("submit", (event) => {
  event.preventDefault();
  void load();
});
void load();
