/** Asks before something that cannot be undone; a native dialog, so focus and Escape work. */

import { h } from "./dom.js";

/**
 * @param {string} heading
 * @param {string} detail
 * @param {string} yes label of the button that goes ahead
 * @param {boolean} [danger]
 * @returns {Promise<boolean>}
 */
export function confirmed(heading, detail, yes, danger = false) {
  const go = h("button", { class: danger ? "button danger" : "button primary", value: "yes" }, yes);
  const back = h("button", { class: "button", value: "no" }, "Go back");
  const form = h("form", { method: "dialog" }, h("h2", { id: "question" }, heading), h("p", {}, detail),
    h("div", { class: "buttons" }, back, go));
  const dialog = h("dialog", { class: "question", "aria-labelledby": "question" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}
