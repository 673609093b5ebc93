/**
 * Sign-in: trades a key, or what the OpenID Connect provider sent the browser back with, for a session, whose secret
 * stays with the pages of this origin.
 */

import { keepSession } from "../ui/api.js";
import { byId, ownUrl, setText } from "../ui/dom.js";

const form = /** @type {HTMLFormElement} */ (byId("login"));
const field = /** @type {HTMLInputElement} */ (byId("key"));
const problem = byId("problem");

const CALLBACK = "/login/callback";
const NEXT = "trivet.next";

/** Where to go after: only to a page of this site. */
function next() {
  const asked = new URLSearchParams(location.search).get("next");
  const path = (location.pathname === CALLBACK ? sessionStorage.getItem(NEXT) : asked) ?? "/";
  return ownUrl(path) ?? "/";
}

/** @param {Response | null} response */
function words(response) {
  if (response === null) return "The service cannot be reached. Is it running?";
  if (response.status === 429) return `Too many wrong keys from this address. Try again in ${response.headers.get("Retry-After") ?? "60"} s.`;
  if (response.status === 403) return "This key cannot sign in: it is one of a service account, or the page is another site's.";
  if (response.status < 500) return "This key is unknown, has expired, or was revoked.";
  return "The service has a problem. Try again in a moment.";
}

/** @param {Response | null} response */
function explain(response) {
  setText(problem, words(response));
  problem.hidden = false;
  field.select();
}

/**
 * @param {string} path
 * @param {URLSearchParams} [body]
 */
function post(path, body) {
  const headers = { Accept: "application/json", "X-Trivet": "1" };
  return fetch(path, { method: "POST", body, headers }).catch(() => null);
}

/** @param {Response} response */
async function enter(response) {
  keepSession((await response.json()).session);
  location.replace(next());
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.hidden = true;
  const response = await post("/login", new URLSearchParams({ key: field.value.trim() }));
  if (response?.ok) await enter(response);
  else explain(response);
});

/** @param {Response | null} response */
async function explainProvider(response) {
  const detail = (await response?.json().catch(() => null))?.detail;
  setText(problem, detail ?? "The service cannot be reached. Is it running?");
  problem.hidden = false;
}

document.getElementById("provider")?.addEventListener("click", async () => {
  problem.hidden = true;
  sessionStorage.setItem(NEXT, next());
  const response = await post("/login/oidc");
  if (response?.ok) location.assign((await response.json()).url);
  else await explainProvider(response);
});

async function finish() {
  const answer = new URLSearchParams(location.search);
  history.replaceState(null, "", CALLBACK);
  const body = new URLSearchParams();
  for (const name of ["state", "code", "iss", "error"]) {
    const value = answer.get(name);
    if (value !== null) body.set(name, value);
  }
  const response = await post("/login/oidc/callback", body);
  if (response?.ok) await enter(response);
  else await explainProvider(response);
}

if (location.pathname === CALLBACK && location.search) await finish();
