/** Every field of a spec, from the schemas that the service checks specs by. */

import { first } from "../lib/drafts.js";
import { many } from "../lib/format.js";
import { entries, found } from "../lib/reference.js";
import { lines, text } from "../lib/spec.js";
import { Problem, call } from "../ui/api.js";
import { byId, fill, h, setAttribute, styled } from "../ui/dom.js";
import { blank, later } from "../ui/status.js";

/** @typedef {import("../lib/reference.js").Entry} Entry */

/** @type {string[]} */
const kinds = JSON.parse(byId("kinds").dataset.kinds ?? "[]");
const find = /** @type {HTMLInputElement} */ (byId("find"));
/** @type {Map<string, HTMLElement>} */
const buttons = new Map();
/** @type {Entry[]} */
let all = [];
let description = "";

const chosen = () => (kinds.includes(location.hash.slice(1)) ? location.hash.slice(1) : (kinds[0] ?? ""));

async function load() {
  const kind = chosen();
  for (const [name, button] of buttons) setAttribute(button, "aria-pressed", String(name === kind));
  try {
    const schema = await call(`/v1/kinds/${encodeURIComponent(kind)}/schema`);
    if (kind !== chosen()) return;
    all = entries(schema);
    description = String(schema.description ?? "").replaceAll("`", "");
    show(kind);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.passing) later(() => void load());
    fill(byId("spec"), blank("The fields cannot be shown", error.message));
  }
}

/** @param {string} kind */
function show(kind) {
  const shown = found(all, find.value);
  const example = h("section", { class: "panel", "aria-label": "Example" },
    h("header", {}, h("h2", {}, "Example"), h("span", { class: "note" }, description),
      h("span", { class: "aside" }, h("a", { class: "button small", href: `/submit?kind=${encodeURIComponent(kind)}` }, "New job of this kind"))),
    h("pre", { class: "yaml", tabindex: 0 }, text(lines(first(kind)))));
  const head = h("tr", {}, ...["Field", "Type", "Default", "What it is"].map((name) => h("th", { scope: "col" }, name)));
  const table = h("table", { class: "table cards fields" }, h("thead", {}, head), h("tbody", {}, ...shown.map(row)));
  fill(byId("spec"), !find.value && example, h("section", { class: "panel", id: "fields", "aria-label": "Fields" },
    h("header", {}, h("h2", {}, "Fields"), h("span", { class: "note" }, many(shown.filter(({ form }) => form === null).length, "field"))),
    shown.length ? table : blank("No field like that")));
}

/** @param {Entry} entry */
function row({ path, depth, form, type, fallback, required, words }) {
  const name = h("th", { scope: "row", class: "code", title: path }, form === null ? (path.split(".").at(-1) ?? "") : form);
  styled(name, "--depth", Math.min(depth + (form === null ? 0 : 1), 6));
  if (form !== null) return h("tr", { class: "form" }, name, h("td", { colspan: 3 }, words));
  const holds = required ? h("strong", {}, "needed") : fallback && h("span", { class: "code" }, fallback);
  return h("tr", { "data-path": path }, name, h("td", { class: "muted" }, type), h("td", { "data-label": "Default" }, holds), h("td", { class: "words" }, words));
}

for (const name of kinds) {
  const each = h("button", { class: "tiny", type: "button", "aria-pressed": "false" }, name);
  each.addEventListener("click", () => (location.hash = name));
  buttons.set(name, each);
  byId("kinds").append(each);
}
find.addEventListener("input", () => show(chosen()));
addEventListener("hashchange", () => void load());
void load();
