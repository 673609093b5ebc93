/** What the search for an instance's verdict split: a tree, drawn row by row, in which one looks closer at a domain. */

import { duration, many, number } from "../lib/format.js";
import { STATES, condition, halves, path, places, roots, stateOf, tally, words } from "../lib/tree.js";
import { call, jobPath } from "../ui/api.js";
import { fill, h, oncePerFrame, s, setAttribute, setText } from "../ui/dom.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/tree.js").SplitTree} SplitTree */
/** @typedef {{instance: number | null, instances: number[], domains: number, seconds: number, ranks: number, searches: SplitTree[]}} Trees */

const AGAIN_MS = 3000;
const HEIGHT = 380;
const ROW = { least: 5, most: 26 };
/** Pixels that a letter takes, and that a row needs for one. */
const LETTER = { wide: 6.6, high: 17 };

export class Tree extends Section {
  constructor() {
    super("Tree of splits", "tree");
    this.choice = h("select", { "aria-label": "Instance whose tree is drawn" });
    this.choice.addEventListener("change", () => this.choose(Number(this.choice.value)));
    this.aside.append(this.choice);
    this.element.hidden = true;
    /** @type {number | null} the instance that the user chose; the one that was split most otherwise */
    this.chosen = null;
    /** @type {Trees | null} */
    this.found = null;
    /** @type {Drawing[]} */
    this.drawings = [];
    this.job = "";
    this.timer = 0;
  }

  /** @param {import("../lib/types.js").Job} job */
  async fetch(job) {
    this.job = job.id;
    this.set(await call(jobPath(job.id, `/tree${this.chosen === null ? "" : `?instance=${this.chosen}`}`)));
  }

  /** The tree grows while its search runs, and is whole when its instance is decided. @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if ((event.type !== "search" && event.type !== "bound") || this.timer) return;
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      void this.again();
    }, AGAIN_MS);
  }

  async again() {
    const asked = this.chosen;
    const found = await call(jobPath(this.job, `/tree${asked === null ? "" : `?instance=${asked}`}`)).catch(() => null);
    if (found && asked === this.chosen) this.set(found);
  }

  /** @param {number} instance */
  choose(instance) {
    if (this.found && !this.found.instances.includes(instance)) return;
    this.chosen = instance;
    void this.again();
  }

  /** @param {Trees} found */
  set(found) {
    const isNew = JSON.stringify(found) !== JSON.stringify(this.found);
    this.found = found;
    this.element.hidden = found.searches.length === 0;
    if (!isNew || this.element.hidden) return;
    setAttribute(this.choice, "hidden", found.instances.length < 2);
    fill(this.choice, ...found.instances.map((each) => h("option", { value: each, selected: each === found.instance }, `instance ${each}`)));
    const shown = found.searches.reduce((sum, tree) => sum + tree.state.length, 0);
    this.remark([found.instances.length < 2 && `instance ${found.instance}`, `${many(found.domains, "domain")} bounded`, duration(found.seconds),
      found.ranks > 1 && `what the first of ${found.ranks} ranks split`].filter(Boolean).join(" · "));
    this.drawings = found.searches.map((tree) => new Drawing(tree, shown));
    fill(this.body, ...this.drawings.map((drawing) => drawing.element));
  }
}

class Drawing {
  /** @param {SplitTree} tree @param {number} shown domains of all trees */
  constructor(tree, shown) {
    this.tree = tree;
    this.below = halves(tree);
    /** @type {number | null} the domain that is as wide as the drawing; all for null */
    this.top = null;
    this.chosen = tree.counterexample ?? 0;
    this.svg = s("svg", { class: "splits", tabindex: 0, role: "application" });
    this.said = h("p", { class: "said", "aria-live": "polite" });
    this.way = h("p", { class: "way muted" });
    this.whole = h("button", { class: "tiny", type: "button", hidden: true }, "whole tree");
    this.whole.addEventListener("click", () => this.zoom(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.draw = oncePerFrame(() => this.paint());
    new ResizeObserver(() => this.draw()).observe(this.svg);
    const deep = Math.max(...places(this.below, roots(tree)).map(({ depth }) => depth));
    const left = tree.below.reduce((sum, count) => sum + count, 0);
    setAttribute(this.svg, "aria-label", `${tree.technique}: ${many(shown, "domain")}, ${deep} deep; arrow keys go to a half, to the next domain and back up, Enter looks closer`);
    this.element = h("figure", { class: "chart wide tree" },
      h("figcaption", {}, h("span", { class: "title" }, sentence(tree.technique)),
        h("span", { class: "unit" }, [`${deep} deep`, left > 0 && `the first ${number(tree.state.length)} domains are drawn, ${number(left)} below them counted`].filter(Boolean).join(" · ")), this.whole),
      this.legend(), this.svg, this.said, this.way);
    this.say();
  }

  legend() {
    const found = tally(this.tree, this.below);
    return h("ul", { class: "legend states" }, ...STATES.filter(([state]) => found[state]).map(([state, word]) =>
      h("li", {}, h("i", { class: "swatch", "data-state": state }), `${number(found[state] ?? 0)} ${word}`)));
  }

  /** Of a domain that is looked at closer, those above it stay as rows over it. */
  rows() {
    const above = this.top === null ? [] : path(this.tree, this.top).slice(0, -1);
    const below = places(this.below, this.top === null ? roots(this.tree) : [this.top]);
    const wide = Math.max(...below.map(({ to }) => to));
    return { wide, all: [...above.map((index, depth) => ({ index, from: 0, to: wide, depth })),
      ...below.map((place) => ({ ...place, depth: place.depth + above.length }))] };
  }

  paint() {
    const width = this.svg.clientWidth;
    if (width === 0) return;
    const { wide, all } = this.rows();
    const deep = Math.max(...all.map(({ depth }) => depth)) + 1;
    const high = Math.min(Math.max(HEIGHT / deep, ROW.least), ROW.most);
    setAttribute(this.svg, "height", Math.ceil(deep * high));
    fill(this.svg, ...all.map(({ index, from, to, depth }) => this.domain(index, (from / wide) * width, (to / wide) * width, depth * high, high)));
  }

  /** @param {number} index @param {number} left @param {number} right @param {number} top @param {number} high */
  domain(index, left, right, top, high) {
    const wide = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.5);
    const text = condition(this.tree, index);
    const state = this.below[index]?.length ? "split" : stateOf(this.tree, index);
    const group = s("g", { "data-index": index, "data-state": state, "data-chosen": index === this.chosen, "data-more": (this.tree.below[index] ?? 0) > 0 },
      s("title", {}, `${text}: ${words(this.tree, this.below, index)}`),
      s("rect", { x: left, y: top, width: wide, height: Math.max(high - 1, 1), rx: Math.min(2, wide / 4) }),
      high >= LETTER.high && wide > (text.length + 1) * LETTER.wide && s("text", { x: left + 5, y: top + high / 2 + 4 }, text));
    group.addEventListener("click", () => {
      if (index === this.chosen) this.zoom(this.top === index ? null : index);
      else this.choose(index);
    });
    return group;
  }

  /** @param {number} index */
  choose(index) {
    this.chosen = index;
    this.say();
    this.draw();
  }

  /** @param {number | null} index */
  zoom(index) {
    this.top = index !== null && this.tree.parent[index] === null && roots(this.tree).length === 1 ? null : index;
    setAttribute(this.whole, "hidden", this.top === null);
    this.draw();
  }

  say() {
    setText(this.said, `${condition(this.tree, this.chosen)}: ${words(this.tree, this.below, this.chosen)}`);
    setText(this.way, path(this.tree, this.chosen).slice(1).map((each) => condition(this.tree, each)).join("  →  "));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const above = this.tree.parent[this.chosen] ?? null;
    const side = above === null ? roots(this.tree) : this.below[above] ?? [];
    const at = side.indexOf(this.chosen);
    /** @type {Record<string, number | null | undefined>} */
    const steps = { ArrowUp: above, ArrowDown: this.below[this.chosen]?.[0], ArrowLeft: side[at - 1], ArrowRight: side[at + 1] };
    if (event.key in steps) {
      event.preventDefault();
      const next = steps[event.key];
      if (next !== null && next !== undefined) this.choose(next);
    } else if (event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      this.zoom(event.key === "Escape" || this.top === this.chosen ? null : this.chosen);
    }
  }
}

/** @param {string} text */
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
