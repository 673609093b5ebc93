/** API keys, for operators: who has which, a new one, and the end of an old one. */

import { ago, dateTime, many, unix } from "../lib/format.js";
import { Problem, call, items, send } from "../ui/api.js";
import { copy } from "../ui/clipboard.js";
import { confirmed } from "../ui/confirm.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { now, withHeadings } from "../ui/parts.js";
import { notify, present } from "../ui/status.js";

/**
 * @typedef {{id: string, name: string, scopes: string[], project: string | null, created_at: string, last_used_at: string | null,
 *   expires_at: string | null, holder: "key" | "person" | "account", successor: string | null}} Key
 */

const DAY_MS = 86_400_000;
const HOLDERS = { key: "", person: "signed in through the provider", account: "service account" };
const form = /** @type {HTMLFormElement} */ (byId("new"));

async function refresh() {
  await present("The keys cannot be shown", async () => {
    const keys = /** @type {Key[]} */ (items(await call("/v1/keys")));
    setText(byId("summary"), many(keys.length, "key"));
    fill(byId("rows"), ...keys.sort((one, other) => one.name.localeCompare(other.name)).map(row));
    withHeadings(/** @type {HTMLTableElement} */ (byId("rows").parentElement));
    fill(byId("blank"));
  }, { again: () => void refresh(), refused: (problem) => (form.hidden = problem.status === 403) });
}

/** @param {string | null} moment */
function age(moment) {
  const seconds = moment === null ? null : unix(moment);
  return h("td", { class: "muted", title: dateTime(seconds) }, seconds === null ? "never" : ago(seconds, now()));
}

/** @param {Key} key */
function row(key) {
  const revoke = h("button", { class: "button small", type: "button", "aria-label": `Revoke a key of ${key.name}` }, "Revoke");
  revoke.addEventListener("click", () => void end(key));
  const ends = key.expires_at === null ? "never" : dateTime(unix(key.expires_at));
  const note = [HOLDERS[key.holder], key.successor && "replaced by a newer key"].filter(Boolean).join(", ");
  return h("tr", { "data-key": key.id }, h("th", { scope: "row" }, key.name, note && h("span", { class: "muted" }, ` ${note}`)),
    h("td", {}, key.scopes.join(", ")), h("td", {}, key.project ?? h("span", { class: "muted" }, "all")), age(key.created_at),
    age(key.last_used_at), h("td", { class: "muted" }, ends), h("td", { class: "right" }, revoke));
}

/** @param {Key} key */
async function end(key) {
  const sure = await confirmed(`Revoke this key of “${key.name}”?`, "Whoever uses it is refused from now on. Jobs that it submitted go on.", "Revoke the key", true);
  if (!sure) return;
  try {
    await call(`/v1/keys/${encodeURIComponent(key.id)}`, { method: "DELETE" });
    notify("The key is revoked.");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    notify(error.message, "error");
  }
  await refresh();
}

/** What the form asks for, as the API takes it. */
function asked() {
  const given = new FormData(form);
  const days = Number(given.get("days"));
  return {
    name: given.get("name"),
    scopes: [given.get("scope")],
    ...(given.get("project") ? { project: given.get("project") } : {}),
    ...(days > 0 ? { expires_at: new Date(Date.now() + days * DAY_MS).toISOString() } : {}),
  };
}

/** @param {string} name @param {string} secret */
function tell(name, secret) {
  const shown = h("code", { tabindex: 0 }, secret);
  const button = h("button", { class: "button small", type: "button" }, "Copy");
  button.addEventListener("click", () => void copy(secret, shown, "The key"));
  const place = byId("secret");
  place.hidden = false;
  fill(place, h("p", {}, h("strong", {}, `The key of ${name}`), ", shown this once:"), h("p", {}, shown, button));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const refused = byId("refused");
  refused.hidden = true;
  try {
    const made = await send("/v1/keys", asked());
    form.reset();
    tell(made.name, made.secret);
    await refresh();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    refused.hidden = false;
    setText(refused, error.errors.length ? error.errors.map((one) => `${one.path}: ${one.message}`).join("; ") : error.message);
  }
});
void refresh();
