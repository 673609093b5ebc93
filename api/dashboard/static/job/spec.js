/** The spec as it was accepted, in the form that people write. */

import { lines, text } from "../lib/spec.js";
import { copy } from "../ui/clipboard.js";
import { h } from "../ui/dom.js";
import { Section } from "./section.js";

export class Spec extends Section {
  constructor() {
    super("Spec", "spec");
    this.code = h("pre", { class: "yaml", tabindex: 0 });
    this.copy = h("button", { class: "tiny", type: "button" }, "Copy");
    this.copy.addEventListener("click", () => void copy(this.text, this.code, "The spec"));
    this.aside.append(this.copy);
    this.body.append(this.code);
    this.text = "";
  }

  /** @param {import("../lib/types.js").Job} job */
  show(job) {
    const { kind, name, ...rest } = job.spec;
    const all = lines({ kind, name, ...rest });
    const written = text(all);
    if (written === this.text) return;
    this.text = written;
    this.code.replaceChildren(...all.flatMap((line) => [...pieces(line), "\n"]));
  }
}

/** @param {import("../lib/spec.js").Line} line */
function pieces(line) {
  const key = line.key === null ? "" : h("span", { class: "key" }, `${line.key}:`);
  const value = line.value === null ? "" : h("span", { class: line.kind }, line.value);
  return ["  ".repeat(line.indent) + (line.item ? "- " : ""), key, line.key !== null && line.value !== null ? " " : "", value];
}
