/** The connection's state in the page's header, and short notices to the user. */

import { Problem } from "./api.js";
import { byId, fill, h, setAttribute, setText } from "./dom.js";

const RETRY_MS = 2000;
const WORDS = {
  connecting: "Connecting",
  live: "Live",
  reconnecting: "Reconnecting",
  ended: "Up to date",
};

/** @param {keyof typeof WORDS} state */
export function showConnection(state) {
  const element = byId("connection");
  setAttribute(element, "data-state", state);
  setAttribute(element, "hidden", null);
  const label = element.querySelector("span");
  if (label) setText(label, WORDS[state]);
}

let retry = 0;

/**
 * Asks again a little later for what nobody answered. One attempt waits at a time.
 * @param {() => void} ask
 */
export function later(ask) {
  window.clearTimeout(retry);
  retry = window.setTimeout(ask, RETRY_MS);
}

/**
 * Asks now, and again and again while somebody looks at the page.
 * @param {() => unknown} ask
 * @param {number} pause in milliseconds
 */
export function poll(ask, pause) {
  window.setInterval(() => {
    if (!document.hidden) void ask();
  }, pause);
  void ask();
}

/**
 * Shows what a page reads. If the service refuses it, or is away, the page says so in its place.
 * @param {string} title what it says then
 * @param {() => Promise<void>} show
 * @param {{again?: () => void, refused?: (problem: Problem) => void}} [otherwise] what to ask again if that may pass
 */
export async function present(title, show, { again, refused } = {}) {
  try {
    await show();
    showConnection("live");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showConnection(error.passing ? "reconnecting" : "live");
    refused?.(error);
    if (error.passing && again) later(again);
    fill(byId("blank"), blank(title, error.message));
  }
}

/**
 * A notice at the foot of the page that leaves by itself; read out by screen readers.
 * @param {string} text
 * @param {"info" | "error"} [tone]
 */
export function notify(text, tone = "info") {
  const notice = h("div", { class: "notice", "data-tone": tone }, text);
  byId("notices").append(notice);
  window.setTimeout(() => notice.remove(), tone === "error" ? 8000 : 4000);
}

/**
 * A block that stands where content would be: nothing yet, nothing found, or an error with a way on.
 * @param {string} heading
 * @param {string} [detail]
 * @param {HTMLElement} [action]
 */
export const blank = (heading, detail = "", action = undefined) =>
  h("div", { class: "blank" }, h("strong", {}, heading), detail && h("p", {}, detail), action);
