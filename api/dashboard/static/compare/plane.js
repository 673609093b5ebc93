/** Jobs as points over two quantities, or as lines over all fields in which their specs differ. */

import { axis, shade, word } from "../lib/axes.js";
import { places, widthOf } from "../lib/labels.js";
import { abreast, first, quantities } from "../lib/plane.js";
import { ran } from "../lib/state.js";
import { fill, h, s, setAttribute, setText } from "../ui/dom.js";
import { now } from "../ui/parts.js";
import { blank } from "../ui/status.js";

/** @typedef {import("../lib/types.js").Job} Job */
/** @typedef {import("../lib/plane.js").Quantity} Quantity */
/** @typedef {"points" | "lines"} View */

const HEIGHT = 320;
const SHADES = 5;
/** Axes side by side, and pixels that each of them wants. */
const [ABREAST, LANE] = [9, 110];
/** Points with their names beside them, and points that the keyboard reaches. */
const [NAMED, REACHED] = [12, 60];
const SHORT = 26;

export class Plane {
  /**
   * @param {(name: "x" | "y" | "view", value: string) => void} chosen told what the user wants to see
   * @param {(name: string | null) => void} pointed told at which job the user points
   */
  constructor(chosen, pointed) {
    this.pointed = pointed;
    /** @type {Job[]} */
    this.jobs = [];
    /** @type {string[]} */
    this.names = [];
    /** @type {Quantity[]} */
    this.quantities = [];
    /** @type {Map<string, unknown>[]} */
    this.values = [];
    /** @type {View} */
    this.view = "points";
    this.x = h("select", { "aria-label": "Across" });
    this.y = h("select", { "aria-label": "Upwards" });
    for (const [name, select] of /** @type {const} */ ([["x", this.x], ["y", this.y]])) {
      select.addEventListener("change", () => chosen(name, select.value));
    }
    this.across = h("label", {}, "Across", this.x);
    this.place = h("div", { class: "plane" });
    this.reading = h("p", { class: "reading muted" });
    this.switches = /** @type {const} */ (["points", "lines"]).map((view) => {
      const button = h("button", { class: "tiny", type: "button" }, view);
      button.addEventListener("click", () => chosen("view", view));
      return { view, button };
    });
    this.element = h("section", { class: "panel", id: "plane", "aria-label": "Fields and results" },
      h("header", {}, h("h2", {}, "Fields and results"),
        h("span", { class: "aside" }, this.across, h("label", {}, "Upwards", this.y),
          h("span", { class: "switch", role: "group", "aria-label": "Drawn as" }, ...this.switches.map(({ button }) => button)))),
      this.place, this.reading);
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  /**
   * @param {Job[]} jobs @param {string[]} names @param {{x: string, y: string, view: string}} wanted
   * @param {(job: Job, name: string) => readonly number[]} curve
   */
  show(jobs, names, wanted, curve) {
    this.jobs = jobs;
    this.names = names;
    const found = quantities(jobs, curve, (job) => ran(job, now()));
    this.quantities = found.quantities;
    this.values = found.values;
    const proposed = first(this.quantities);
    this.list(this.x, this.quantities, wanted.x || proposed.x);
    this.list(this.y, this.quantities.filter((one) => one.numeric), wanted.y || proposed.y);
    this.view = wanted.view === "lines" ? "lines" : "points";
    for (const { view, button } of this.switches) setAttribute(button, "aria-pressed", String(view === this.view));
    this.across.hidden = this.view === "lines";
    this.element.hidden = jobs.length < 2 || !this.y.value;
    this.draw();
  }

  /** @param {HTMLSelectElement} select @param {Quantity[]} all @param {string} chosen */
  list(select, all, chosen) {
    if (all.map(({ path }) => path).join() !== [...select.options].map((option) => option.value).join()) {
      fill(select, ...all.map(({ path, words }) => h("option", { value: path }, words)));
    }
    select.value = all.some(({ path }) => path === chosen) ? chosen : (all[0]?.path ?? "");
  }

  draw() {
    const width = this.place.clientWidth;
    if (this.element.hidden || width === 0) return;
    const chart = this.view === "points" ? this.points(width) : this.lines(width);
    fill(this.place, chart ?? blank("Nothing to draw", "Fewer than two of these jobs have both values so far."));
  }

  /** @param {string} path */
  all = (path) => this.values.map((each) => each.get(path));

  /** @param {number} width @param {string} words @param {...Node} content */
  picture(width, words, ...content) {
    return s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "group", "aria-label": words }, ...content);
  }

  /** @param {number} width */
  points(width) {
    const [x, y] = [this.x.value, this.y.value];
    const both = this.values.map((each) => isThere(each.get(x)) && isThere(each.get(y)));
    if (both.filter(Boolean).length < 2) return null;
    const kept = (/** @type {string} */ path) => this.all(path).filter((_, index) => both[index]);
    const area = { left: 58, right: width - 18, top: 32, bottom: HEIGHT - 44 };
    const room = Math.max(Math.floor(width / 110), 2);
    const upwards = kept(y);
    const across = axis(kept(x), [area.left, area.right], room, room);
    const up = axis(upwards, [area.bottom, area.top], 6);
    const shown = this.jobs.flatMap((_, index) => (both[index] ? [index] : []));
    const at = shown.map((index) => ({ x: across.at(this.values[index]?.get(x)), y: up.at(this.values[index]?.get(y)) }));
    const labels = places(at, shown.map((index) => cut(this.names[index] ?? "")), { ...area, right: width });
    const marks = shown.map((index, order) => this.point(index, at[order] ?? { x: 0, y: 0 }, labels[order] ?? null, upwards));
    const words = `${marks.length} jobs: ${this.wordsOf(y)} against ${this.wordsOf(x)}`;
    return this.picture(width, words, ...grid(across, up, area),
      s("text", { class: "name", x: 0, y: 12 }, this.wordsOf(y)),
      s("text", { class: "name", x: (area.left + area.right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, this.wordsOf(x)), ...marks);
  }

  /**
   * @param {number} index @param {{x: number, y: number}} at @param {import("../lib/labels.js").Label | null} label where the
   *     name has room @param {unknown[]} all values upwards
   */
  point(index, at, label, all) {
    const [x, y] = [this.values[index]?.get(this.x.value), this.values[index]?.get(this.y.value)];
    const name = this.names[index] ?? "";
    const text = all.length <= NAMED && label !== null &&
      s("text", { class: "halo", x: label.x, y: label.y, "text-anchor": label.anchor }, cut(name));
    const mark = s("circle", { cx: at.x.toFixed(1), cy: at.y.toFixed(1), r: 5, "data-shade": shade(y, all, SHADES) });
    return this.linked(index, all.length, `${name}: ${this.wordsOf(this.x.value)} ${word(x)}, ${this.wordsOf(this.y.value)} ${word(y)}`, mark, text);
  }

  /** @param {number} width */
  lines(width) {
    const chosen = abreast(this.quantities, this.y.value, Math.min(Math.max(Math.floor(width / LANE), 2), ABREAST));
    if (chosen.length < 2) return null;
    const [top, bottom, side] = [34, HEIGHT - 26, 70];
    const axes = chosen.map((one, index) => ({ ...one, x: side + (index / (chosen.length - 1)) * (width - 2 * side),
      ...axis(this.all(one.path), [bottom, top], 5) }));
    const all = this.all(this.y.value);
    const drawn = this.jobs.flatMap((_, index) => {
      const places = axes.map((one) => [one.x, one.at(this.values[index]?.get(one.path))]);
      const path = places.filter(([, y]) => Number.isFinite(y)).map(([x, y]) => `${x?.toFixed(1)},${y?.toFixed(1)}`).join(" ");
      const words = `${this.names[index]}: ${axes.map((one) => `${one.words} ${word(this.values[index]?.get(one.path))}`).join(", ")}`;
      return path.includes(" ") ? [this.linked(index, this.jobs.length, words,
        s("polyline", { points: path, "data-shade": shade(all[index], all, SHADES) }))] : [];
    });
    const lane = (width - 2 * side) / (axes.length - 1);
    return this.picture(width, `${drawn.length} jobs over ${chosen.map(({ words }) => words).join(", ")}`, ...drawn,
      ...axes.flatMap((one, index) => pole(one, top, bottom, lane, index === 0)));
  }

  /**
   * A mark that leads to its job, and says in words what it stands for.
   * @param {number} index @param {number} count of all marks @param {string} words @param {...(Element | false)} marks
   */
  linked(index, count, words, ...marks) {
    const job = this.jobs[index];
    const name = this.names[index] ?? null;
    const link = s("a", { href: `/jobs/${encodeURIComponent(job?.id ?? "")}`, class: "mark", "data-job": job?.id ?? "", "aria-label": words,
      tabindex: count > REACHED ? -1 : null }, ...marks);
    const tell = (/** @type {boolean} */ there) => {
      setText(this.reading, there ? words : "");
      this.pointed(there ? name : null);
    };
    for (const event of ["pointerenter", "focus"]) link.addEventListener(event, () => tell(true));
    for (const event of ["pointerleave", "blur"]) link.addEventListener(event, () => tell(false));
    return link;
  }

  /** @param {string} path */
  wordsOf = (path) => this.quantities.find((one) => one.path === path)?.words ?? path;

  /** Lets the mark of one job stand out, or none. @param {string | null} name */
  raise(name) {
    for (const mark of this.place.querySelectorAll(".mark")) {
      const index = this.jobs.findIndex((job) => job.id === mark.getAttribute("data-job"));
      setAttribute(mark, "data-raised", name !== null && this.names[index] === name && "true");
    }
    setAttribute(this.place, "data-raising", name !== null && "true");
  }
}

/** @param {import("../lib/axes.js").Axis} across @param {import("../lib/axes.js").Axis} up @param {{left: number, right: number, top: number, bottom: number}} area */
const grid = (across, up, area) => [
  ...up.ticks.flatMap(({ at, label }) => [
    s("line", { x1: area.left, x2: area.right, y1: at.toFixed(1), y2: at.toFixed(1) }),
    s("text", { x: area.left - 8, y: at + 4, "text-anchor": "end" }, cut(label, 8))]),
  ...across.ticks.flatMap(({ at, label }) => [
    s("line", { x1: at.toFixed(1), x2: at.toFixed(1), y1: area.top, y2: area.bottom }),
    s("text", { x: at, y: area.bottom + 17, "text-anchor": "middle" }, cut(label, 14))]),
];

/**
 * One of several axes, with its name above it and its values beside it: of the first where no lines are, else on a ground
 * of their own.
 * @param {Quantity & import("../lib/axes.js").Axis & {x: number}} axis @param {number} top @param {number} bottom
 * @param {number} lane pixels to the next axis @param {boolean} isFirst
 */
function pole({ x, words, ticks }, top, bottom, lane, isFirst) {
  const value = (/** @type {{at: number, label: string}} */ { at, label }) => {
    const text = cut(label, 12);
    const ground = s("rect", { class: "ground", x: x + 3, y: at - 7, width: widthOf(text) + 6, height: 14, rx: 2 });
    return isFirst ? [s("text", { x: x - 6, y: at + 4, "text-anchor": "end" }, text)] : [ground, s("text", { x: x + 6, y: at + 4 }, text)];
  };
  return [
    s("line", { class: "pole", x1: x.toFixed(1), x2: x.toFixed(1), y1: top, y2: bottom }),
    s("text", { class: "name", x, y: 14, "text-anchor": "middle" }, cut(words, Math.max(Math.floor(lane / 7.5), 8))),
    ...ticks.flatMap(value),
  ];
}

/** @param {unknown} value */
const isThere = (value) => value !== undefined && value !== null && !(typeof value === "number" && !Number.isFinite(value));

/** @param {string} text @param {number} [most] */
const cut = (text, most = SHORT) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
