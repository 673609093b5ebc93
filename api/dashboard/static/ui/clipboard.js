/** Text onto the clipboard. */

import { notify } from "./status.js";

/**
 * Where the browser does not allow it, the element that shows the text is selected instead.
 * @param {string} text
 * @param {Element} shown
 * @param {string} what the text is: `The spec`
 */
export async function copy(text, shown, what) {
  try {
    await navigator.clipboard.writeText(text);
    notify(`${what} is on the clipboard.`);
  } catch {
    window.getSelection()?.selectAllChildren(shown);
    notify(`${what} is selected; copy it with the keyboard.`);
  }
}
