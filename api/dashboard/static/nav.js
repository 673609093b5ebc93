/** Shows the entries of the navigation that only operators may follow. */

import { me } from "./ui/me.js";

void me().then(({ operator }) => {
  for (const entry of document.querySelectorAll("nav [data-operator]")) /** @type {HTMLElement} */ (entry).hidden = !operator;
});
