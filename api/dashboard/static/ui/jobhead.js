/** The headings of the job list, which sort it. */

import { heading, isMeasure, isRight } from "../lib/columns.js";
import { h, setAttribute, setText } from "./dom.js";

/**
 * @param {Element} row the line of headings, which begins with a box to select all
 * @param {readonly string[]} columns
 * @param {{by: string, descending: boolean} | null} sort
 * @param {(by: string) => void} wanted
 */
export function showHead(row, columns, sort, wanted) {
  const names = ["status", "what", ...columns];
  /** @type {Map<string | null, Element>} */
  const known = new Map();
  for (const button of row.querySelectorAll("button[data-sort]")) known.set(button.getAttribute("data-sort"), /** @type {Element} */ (button.closest("th")));
  for (const [name, cell] of known) if (!names.includes(name ?? "")) cell.remove();
  // A heading that stays is not put in again: a click that has begun on it would be lost.
  names.forEach((name, index) => {
    const cell = known.get(name) ?? newCell(name, wanted);
    mark(cell, sort?.by === name ? sort : null);
    if (row.children[index + 1] !== cell) row.insertBefore(cell, row.children[index + 1] ?? null);
  });
}

/** @param {string} name @param {(by: string) => void} wanted */
function newCell(name, wanted) {
  const button = h("button", { type: "button", "data-sort": name, title: `Sort by ${heading(name).toLowerCase()}` }, heading(name),
    h("span", { "aria-hidden": "true" }));
  button.addEventListener("click", () => wanted(name));
  return h("th", { scope: "col", class: `${isMeasure(name) ? "measure" : name}${isRight(name) ? " right" : ""}` }, button);
}

/** @param {Element} cell @param {{descending: boolean} | null} sort */
function mark(cell, sort) {
  setAttribute(cell, "aria-sort", sort && (sort.descending ? "descending" : "ascending"));
  setText(/** @type {Element} */ (cell.querySelector("span")), sort ? (sort.descending ? "▼" : "▲") : "");
}
