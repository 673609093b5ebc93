/** Calls to the API in the session that a sign-in began; problems come back as errors that a person can read. */

/**
 * Where the session's secret for pages is kept: by origin, with its port, whereas cookies go to every port of a host.
 * The service wants both.
 */
const SESSION = "trivet-session";

/** @param {string} secret what signing in answered */
export const keepSession = (secret) => localStorage.setItem(SESSION, secret);

/** What a request of a page has beside the cookie; what a page asks that nobody sees is no use of the session. */
export const sessionHeader = () => ({
  "X-Trivet-Session": localStorage.getItem(SESSION) ?? "",
  ...(document.hidden ? { "X-Trivet-Unseen": "1" } : {}),
});

/** A response's date is cut to seconds, and clocks of one site differ a little. */
const OVERLAP_MS = 3000;

export class Problem extends Error {
  /**
   * @param {number} status HTTP status; 0 when nobody answered
   * @param {string} title
   * @param {string} detail
   * @param {{path: string, message: string, expected: string}[]} [errors] field by field
   */
  constructor(status, title, detail, errors = []) {
    super(detail || title);
    this.name = "Problem";
    this.status = status;
    this.title = title;
    this.errors = errors;
  }

  /** Whether the same call may succeed a little later. */
  get passing() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/**
 * @param {string} path below the origin
 * @param {RequestInit} [options]
 * @returns {Promise<any>} the JSON answer; null where there is none
 */
export async function call(path, options = {}) {
  const response = await answer(path, options);
  return response.status === 204 ? null : response.json();
}

/**
 * A call that changes something.
 * @param {string} path
 * @returns {Promise<any>}
 */
export const post = (path) => call(path, { method: "POST" });

/**
 * A call that sends JSON, as text that was written already where it matters how.
 * @param {string} path
 * @param {unknown} value
 * @param {Record<string, string>} [headers]
 * @returns {Promise<any>}
 */
export const send = (path, value, headers = {}) =>
  call(path, {
    method: "POST",
    body: typeof value === "string" ? value : JSON.stringify(value),
    headers: { Accept: "application/json", "Content-Type": "application/json", ...sessionHeader(), ...headers },
  });

/**
 * Stores a file for specs to name.
 * @param {File} file
 * @returns {Promise<{id: string, bytes: number}>}
 */
export const upload = (file) =>
  call(`/v1/files?name=${encodeURIComponent(file.name.slice(0, 200))}`, {
    method: "POST",
    body: file,
    headers: { Accept: "application/json", "Content-Type": "application/octet-stream", ...sessionHeader() },
  });

/**
 * The path with a ticket that admits the session to it for some minutes: links and event streams send no header.
 * @param {string} path
 * @returns {Promise<string>}
 */
export async function admitted(path) {
  const body = new URLSearchParams({ path: path.split("?")[0] });
  const { ticket } = await call("/tickets", { method: "POST", body });
  return `${path}${path.includes("?") ? "&" : "?"}ticket=${encodeURIComponent(ticket)}`;
}

/**
 * An answer of one JSON object a line.
 * @param {string} path
 * @returns {Promise<any[]>}
 */
export async function callLines(path) {
  const text = await (await answer(path, {})).text();
  return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

/**
 * The answer together with the service's own time, as the id of an event stream that starts a little before it.
 * @param {string} path
 * @returns {Promise<{body: any, after: string}>}
 */
export async function callAt(path) {
  const response = await answer(path, {});
  const date = Date.parse(response.headers.get("Date") ?? "") || Date.now();
  return { body: await response.json(), after: `${date - OVERLAP_MS}-0` };
}

/** What the page asked for before its modules were there, once (early.js). @param {string} path */
function begun(path) {
  const early = /** @type {{early?: Map<string, Promise<Response>>}} */ (window).early;
  const answer = early?.get(path);
  early?.delete(path);
  return answer;
}

/** @param {string} path @param {RequestInit} options */
async function answer(path, options) {
  let response;
  try {
    const headers = { Accept: "application/json", ...sessionHeader() };
    response = await (options.method ? undefined : begun(path)) ?? await fetch(path, { credentials: "same-origin", headers, ...options });
  } catch {
    throw new Problem(0, "No connection", "The service cannot be reached.");
  }
  if (response.status === 401) {
    signIn();
    throw new Problem(401, "Signed out", "The session has ended. Sign in again.");
  }
  if (!response.ok) throw await problem(response);
  return response;
}

/** @param {Response} response */
async function problem(response) {
  const body = await response.json().catch(() => ({}));
  return new Problem(response.status, String(body.title ?? response.statusText), String(body.detail ?? ""), body.errors ?? []);
}

/** Whether the user is on the way out: what is still asked by this page is refused then, which is no news. */
let isSigningOut = false;
addEventListener("submit", (event) => {
  isSigningOut ||= /** @type {HTMLFormElement} */ (event.target).action.endsWith("/logout");
});
addEventListener("pageshow", () => (isSigningOut = false));

/** Leaves for the sign-in page, to come back here after it. */
export function signIn() {
  if (isSigningOut) return;
  const here = location.pathname + location.search;
  location.assign(`/login?next=${encodeURIComponent(here)}`);
}

/**
 * The path of a job's resource.
 * @param {string} id
 * @param {string} [rest]
 */
export const jobPath = (id, rest = "") => `/v1/jobs/${encodeURIComponent(id)}${rest}`;

/**
 * The path of an artifact; its name may hold slashes.
 * @param {string} id
 * @param {string} name
 */
export const artifactPath = (id, name) => jobPath(id, `/artifacts/${name.split("/").map(encodeURIComponent).join("/")}`);

/**
 * The list inside an answer, which is `{items: […]}`.
 * @param {any} body
 * @returns {any[]}
 */
export const items = (body) => (Array.isArray(body) ? body : (body?.items ?? []));
