/** Calls to the API with the session's cookie; problems come back as errors that a person can read. */

/** A response's date is cut to seconds, and clocks of one site differ a little. */
const OVERLAP_MS = 3000;

export class Problem extends Error {
  /**
   * @param {number} status HTTP status; 0 when nobody answered
   * @param {string} title
   * @param {string} detail
   */
  constructor(status, title, detail) {
    super(detail || title);
    this.name = "Problem";
    this.status = status;
    this.title = title;
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
 * A call that changes something; the header tells the service that its own page asks, not another site's.
 * @param {string} path
 * @returns {Promise<any>}
 */
export const post = (path) => call(path, { method: "POST", headers: { Accept: "application/json", "X-Trivet": "1" } });

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

/** @param {string} path @param {RequestInit} options */
async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", headers: { Accept: "application/json" }, ...options });
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
  return new Problem(response.status, String(body.title ?? response.statusText), String(body.detail ?? ""));
}

/** Leaves for the sign-in page, to come back here after it. */
export function signIn() {
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
