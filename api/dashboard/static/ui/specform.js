/** A form for a kind's spec, made from its JSON Schema. It shows a spec, and tells which value the user changed. */

import { chosen, inside, read, shown } from "../lib/schema.js";
import { fill, h, setAttribute, setText } from "./dom.js";

/** @typedef {import("../lib/schema.js").Field} Field */
/** @typedef {import("../lib/schema.js").Schema} Schema */
/** @typedef {{element: HTMLElement, show: (value: unknown, errors: Map<string, string>) => void}} Part */

/**
 * @typedef {object} FormEvents
 * @property {(path: string, value: unknown) => void} changed undefined where the field was emptied
 * @property {(file: File, path: string) => void} dropped a file onto a field that names one
 */

/** Of a union's value only what other variants know too is kept when another one is chosen. */
const NOTHING = {};

let parts = 0;

/**
 * The part of the form for a field.
 * @param {Field} field @param {Schema} root @param {FormEvents} events @param {boolean} [open]
 * @returns {Part}
 */
export function part(field, root, events, open = field.required) {
  if (field.type === "group") return new Group(field, root, events, open);
  if (field.type === "union") return new Union(field, root, events, open);
  return new Leaf(field, events);
}

/** @param {Field[]} fields @param {Schema} root @param {FormEvents} events */
const partsOf = (fields, root, events) => fields.map((field) => ({ name: field.name, part: part(field, root, events) }));

class Leaf {
  /** @param {Field} field @param {FormEvents} events */
  constructor(field, events) {
    this.field = field;
    const id = `field-${++parts}`;
    this.problem = h("p", { class: "problem", id: `${id}-problem`, hidden: true });
    this.input = control(field, id);
    this.input.addEventListener("change", () => events.changed(field.path, this.value()));
    this.element = h("div", { class: "field", "data-path": field.path },
      h("label", { for: id }, field.name, field.required && h("span", { class: "muted", title: "required" }, " *")),
      h("div", { class: "entry" }, this.input, field.names === "file" && this.chooser(events)),
      field.words && h("p", { class: "words", id: `${id}-words` }, field.words), this.problem);
    setAttribute(this.input, "aria-describedby", [field.words && `${id}-words`, `${id}-problem`].filter(Boolean).join(" "));
  }

  /** @param {FormEvents} events */
  chooser(events) {
    const file = h("input", { type: "file", "aria-label": `Upload a file for ${this.field.path}` });
    file.addEventListener("change", () => file.files?.[0] && events.dropped(file.files[0], this.field.path));
    return h("label", { class: "button small upload" }, "Upload…", file);
  }

  value() {
    const { field, input } = this;
    if (field.type === "choice") return input.value === "" ? undefined : field.choices[Number(input.value)];
    if (field.type === "switch") return input.value === "" ? undefined : input.value === "true";
    return read(field, input.value);
  }

  /** @param {unknown} value @param {Map<string, string>} errors */
  show(value, errors) {
    const { field, input } = this;
    const isSwitch = field.type === "switch" && typeof value === "boolean";
    const choice = field.choices.indexOf(value);
    const text = field.type === "choice" ? (choice < 0 ? "" : String(choice)) : isSwitch ? String(value) : shown(field, value);
    if (document.activeElement !== input || input instanceof HTMLSelectElement) input.value = text;
    const message = [...errors].filter(([path]) => path === field.path || path.startsWith(`${field.path}.`)).map(([, told]) => told).join("; ");
    setText(this.problem, message);
    this.problem.hidden = message === "";
    setAttribute(input, "aria-invalid", message !== "" && "true");
  }
}

/** @param {Field} field @param {string} id @returns {HTMLInputElement | HTMLSelectElement} */
function control(field, id) {
  const fallback = field.fallback === undefined || field.fallback === null ? "" : shown(field, field.fallback);
  if (field.type === "choice" || field.type === "switch") {
    const values = field.type === "switch" ? [[true, "true"], [false, "false"]] : field.choices.map((choice, index) => [choice, String(index)]);
    return h("select", { id }, h("option", { value: "" }, fallback === "" ? "–" : `${fallback} (default)`),
      ...values.map(([choice, value]) => h("option", { value: String(value) }, String(choice))));
  }
  return h("input", { id, type: "text", inputmode: field.type === "number" ? "decimal" : null, placeholder: fallback, spellcheck: "false",
    autocapitalize: "off", autocomplete: "off", list: field.names === "job" ? "jobs-known" : field.names === "file" ? "files-known" : null });
}

/** What groups and unions share: a heading that folds. */
class Folded {
  /** @param {Field} field @param {boolean} open @param {HTMLElement[]} content */
  constructor(field, open, content) {
    this.field = field;
    /** Whether a value was shown before: what the first one has is open, then folding is the user's. */
    this.met = false;
    this.given = h("span", { class: "muted given" });
    this.problem = h("p", { class: "problem", hidden: true });
    this.body = h("div", { class: "fields" }, ...content);
    this.element = h("details", { class: "group", "data-path": field.path, open },
      h("summary", {}, h("span", { class: "name" }, field.name, field.required && h("span", { class: "muted", title: "required" }, " *")), this.given),
      field.words && h("p", { class: "words" }, field.words), this.problem, this.body);
  }

  /** @param {unknown} value @param {Map<string, string>} errors */
  told(value, errors) {
    const own = errors.get(this.field.path);
    setText(this.problem, own ?? "");
    this.problem.hidden = !own;
    const told = value === undefined || value === null ? "" : summary(value);
    setText(this.given, told);
    setAttribute(this.given, "title", told || null);
    if (!this.met && value !== undefined && value !== null) this.element.open = true;
    this.met = true;
    if ([...errors.keys()].some((path) => path === this.field.path || path.startsWith(`${this.field.path}.`))) this.element.open = true;
  }
}

/** @param {unknown} value */
function summary(value) {
  const text = typeof value === "object" ? Object.entries(/** @type {object} */ (value)).map(([name, each]) => `${name}: ${typeof each === "object" ? "…" : each}`).join(", ") : String(value);
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

class Group extends Folded {
  /** @param {Field} field @param {Schema} root @param {FormEvents} events @param {boolean} open */
  constructor(field, root, events, open) {
    const inner = partsOf(field.fields, root, events);
    super(field, open, inner.map((one) => one.part.element));
    this.inner = inner;
  }

  /** @param {unknown} value @param {Map<string, string>} errors */
  show(value, errors) {
    this.told(value, errors);
    for (const one of this.inner) one.part.show(/** @type {any} */ (value ?? NOTHING)[one.name], errors);
  }
}

class Union extends Folded {
  /** @param {Field} field @param {Schema} root @param {FormEvents} events @param {boolean} open */
  constructor(field, root, events, open) {
    const select = h("select", { "aria-label": `Form of ${field.path}` }, h("option", { value: "-1" }, field.required ? "choose one" : "default"),
      ...field.variants.map(({ title }, index) => h("option", { value: index }, title)));
    const place = h("div", { class: "fields" });
    super(field, open, [h("div", { class: "field" }, select), place]);
    this.root = root;
    this.events = events;
    this.select = select;
    this.place = place;
    /** @type {{name: string, part: Part}[]} */
    this.inner = [];
    this.shown = -1;
    select.addEventListener("change", () => events.changed(field.path, this.fresh(Number(select.value))));
  }

  /** The value of a variant that was chosen: its constants, what tells it apart, and what was given that it knows too. @param {number} index */
  fresh(index) {
    const variant = this.field.variants[index];
    if (!variant) return undefined;
    const given = Object.entries(/** @type {object} */ (this.value ?? NOTHING)).filter(([name]) => variant.known.includes(name) && !(name in variant.consts));
    const marks = variant.needed.filter((name) => !(name in variant.consts) && variant.title.endsWith(name));
    const empty = marks.map((name) => [name, variant.schema.properties[name]?.type === "string" ? "" : {}]);
    return { ...variant.consts, ...Object.fromEntries([...empty, ...given]) };
  }

  /** @param {unknown} value @param {Map<string, string>} errors */
  show(value, errors) {
    this.told(value, errors);
    this.value = value;
    const index = chosen(this.field.variants, value);
    this.select.value = String(index);
    const variant = this.field.variants[index];
    if (index !== this.shown) {
      this.shown = index;
      const depth = this.field.path.split(".").length;
      const fields = variant ? inside(variant.schema, this.root, this.field.path, depth).filter(({ name }) => !(name in variant.consts)) : [];
      this.inner = partsOf(fields, this.root, this.events);
      fill(this.place, ...this.inner.map((one) => one.part.element));
    }
    for (const one of this.inner) one.part.show(/** @type {any} */ (value ?? NOTHING)[one.name], errors);
  }
}
