/** Sign-in: trades a key for a session, whose secret stays with the pages of this origin. */

import { keepSession } from "../ui/api.js";
import { byId, setText } from "../ui/dom.js";

const form = /** @type {HTMLFormElement} */ (byId("login"));
const field = /** @type {HTMLInputElement} */ (byId("key"));
const problem = byId("problem");

/** Where to go after: only a path of this site. */
function next() {
  const path = new URLSearchParams(location.search).get("next") ?? "/";
  return /^\/(?![/\\])/.test(path) ? path : "/";
}

/** @param {Response | null} response */
function words(response) {
  if (response === null) return "The service cannot be reached. Is it running?";
  if (response.status === 429) return `Too many wrong keys from this address. Try again in ${response.headers.get("Retry-After") ?? "60"} s.`;
  if (response.status < 500) return "This key is unknown, or was revoked.";
  return "The service has a problem. Try again in a moment.";
}

/** @param {Response | null} response */
function explain(response) {
  setText(problem, words(response));
  problem.hidden = false;
  field.select();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.hidden = true;
  const body = new URLSearchParams({ key: field.value.trim() });
  const headers = { Accept: "application/json", "X-Trivet": "1" };
  const response = await fetch("/login", { method: "POST", body, headers }).catch(() => null);
  if (!response?.ok) {
    explain(response);
    return;
  }
  keepSession((await response.json()).session);
  location.assign(next());
});
