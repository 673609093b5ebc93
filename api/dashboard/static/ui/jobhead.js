/** The headings of the job list, which sort it. */

import { heading, isMeasure, isRight } from "../lib/columns.js";
import { h } from "./dom.js";

/**
 * @param {Element} row the line of headings, which begins with a box to select all
 * @param {readonly string[]} columns
 * @param {{by: string, descending: boolean} | null} sort
 * @param {(by: string) => void} wanted
 */
export function showHead(row, columns, sort, wanted) {
  const focused = document.activeElement?.getAttribute("data-sort");
  const cells = ["status", "what", ...columns].map((name) => cell(name, sort, wanted));
  row.replaceChildren(/** @type {Element} */ (row.firstElementChild), ...cells);
  if (focused) /** @type {HTMLElement | null} */ (row.querySelector(`button[data-sort="${CSS.escape(focused)}"]`))?.focus();
}

/** @param {string} name @param {{by: string, descending: boolean} | null} sort @param {(by: string) => void} wanted */
function cell(name, sort, wanted) {
  const way = sort?.by === name ? (sort.descending ? "descending" : "ascending") : null;
  const mark = { ascending: "▲", descending: "▼" }[way ?? ""] ?? "";
  const button = h("button", { type: "button", "data-sort": name, title: `Sort by ${heading(name).toLowerCase()}` }, heading(name),
    h("span", { "aria-hidden": "true" }, mark));
  button.addEventListener("click", () => wanted(name));
  return h("th", { scope: "col", class: `${isMeasure(name) ? "measure" : name}${isRight(name) ? " right" : ""}`, "aria-sort": way }, button);
}
