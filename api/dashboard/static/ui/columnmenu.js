/** The menu with the columns of the job list. */

import { COLUMNS, heading } from "../lib/columns.js";
import { fill, h } from "./dom.js";

export class ColumnMenu {
  /** @param {HTMLDetailsElement} element @param {(name: string) => void} toggled */
  constructor(element, toggled) {
    this.element = element;
    this.toggled = toggled;
    this.choices = /** @type {Element} */ (element.querySelector(".choices"));
    this.shown = "";
    /** @type {[readonly string[], readonly string[]]} */
    this.known = [[], []];
    element.addEventListener("toggle", () => this.draw());
    document.addEventListener("click", ({ target }) => {
      if (!element.contains(/** @type {Node} */ (target))) element.open = false;
    });
    element.addEventListener("keydown", ({ key }) => {
      if (key !== "Escape") return;
      element.open = false;
      element.querySelector("summary")?.focus();
    });
  }

  /** @param {readonly string[]} columns that are shown @param {readonly string[]} measures that there are */
  show(columns, measures) {
    this.known = [columns, measures];
    this.draw();
  }

  /** What is closed has no boxes. */
  draw() {
    const [columns, measures] = this.element.open ? this.known : [[], null];
    if (measures === null) {
      this.shown = "";
      return void fill(this.choices);
    }
    const known = [...new Set([...measures, ...columns.filter((name) => !COLUMNS.has(name))])];
    const signature = JSON.stringify([columns, known]);
    if (signature === this.shown) return;
    this.shown = signature;
    const focused = document.activeElement instanceof HTMLInputElement ? document.activeElement.name : "";
    fill(this.choices, ...[...COLUMNS.keys()].map((name) => this.choice(name, columns)),
      known.length > 0 && h("h3", {}, "From results"), ...known.map((name) => this.choice(name, columns)));
    const again = focused && this.choices.querySelector(`input[name="${CSS.escape(focused)}"]`);
    if (again instanceof HTMLElement) again.focus();
  }

  /** @param {string} name @param {readonly string[]} columns */
  choice(name, columns) {
    const box = h("input", { type: "checkbox", name });
    box.checked = columns.includes(name);
    box.addEventListener("change", () => this.toggled(name));
    return h("label", {}, box, heading(name));
  }
}
