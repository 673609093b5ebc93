/** The filters of the job list, as the page's address has them and as the API takes them. Pure. */

/** Fields of the form; states, the order and sweeps have controls of their own. */
export const FIELDS = ["q", "kind", "label", "owner", "project"];
/** What links ask for, beside the fields. */
const LINKED = ["needs"];

/** In the order of the list: what runs, what waits, what is over. */
export const STATES_SHOWN = ["running", "starting", "cancelling", "queued", "failed", "succeeded", "cancelled"];

/**
 * What a list and its counts have in common. Jobs of sweeps are folded into their parents, unless they are asked for.
 * @param {string} address a query string
 */
function common(address) {
  const given = new URLSearchParams(address);
  const wanted = new URLSearchParams();
  for (const name of [...FIELDS, ...LINKED]) {
    const value = given.get(name);
    if (value) wanted.set(name, value);
  }
  const sweep = given.get("sweep") || "none";
  if (sweep !== "all") wanted.set("sweep", sweep);
  return { given, wanted };
}

/**
 * @param {string} address
 * @param {number} limit
 */
export function listPath(address, limit) {
  const { given, wanted } = common(address);
  for (const state of given.getAll("state")) wanted.append("state", state);
  wanted.set("order", given.get("order") === "newest" ? "newest" : "active");
  wanted.set("limit", String(limit));
  const cursor = given.get("cursor");
  if (cursor) wanted.set("cursor", cursor);
  return `/v1/jobs?${wanted}`;
}

/** @param {string} address */
export const countsPath = (address) => `/v1/jobs:counts?${common(address).wanted}`;

/** Whether the list may lack jobs that another one has. @param {string} address */
export function isNarrowed(address) {
  const given = new URLSearchParams(address);
  return [...FIELDS, ...LINKED, "state"].some((name) => given.get(name)) || !["", "all"].includes(given.get("sweep") ?? "");
}

/**
 * The address with a state added to those wanted, or taken away; an empty state stands for all of them.
 * @param {string} address
 * @param {string} state
 */
export function toggled(address, state) {
  const changed = new URLSearchParams(address);
  const before = changed.getAll("state");
  const after = before.includes(state) ? before.filter((one) => one !== state) : [...before, state];
  for (const name of ["state", "cursor", "from"]) changed.delete(name);
  for (const one of state ? after : []) changed.append("state", one);
  return changed.toString();
}
