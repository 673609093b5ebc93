/** Rows of timed cells on a canvas: hover or arrow keys read them, dragging zooms, a double click shows all again. */

import { cellAt, drawn, neighbour, reach, zoomed } from "../lib/gantt.js";
import { linear, linearTicks } from "../lib/scales.js";
import { Surface, frame } from "./canvas.js";
import { h, setAttribute, setText, styled } from "./dom.js";

/** @typedef {import("../lib/gantt.js").Cell} Cell */
/** @typedef {import("../lib/gantt.js").Row} Row */
/** @typedef {import("../lib/gantt.js").Spot} Spot */
/** @typedef {import("./canvas.js").Box} Box */

const ROW_PIXELS = 30;
const AROUND_PIXELS = 32;
const GAP_PIXELS = 5;
/** Of a row with two lanes, what the upper one gets. */
const UPPER_SHARE = 0.34;
const TEXT_PIXELS = 12;
const DRAG_PIXELS = 5;
const SLACK_PIXELS = 3;

export class Gantt {
  /**
   * @param {string} name for screen readers
   * @param {(value: number, step?: number) => string} label of a tick
   * @param {(low: number, high: number, count: number) => number[]} [ticks]
   */
  constructor(name, label, ticks = linearTicks) {
    this.name = name;
    this.ticks = ticks;
    this.label = label;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {[number, number]} */
    this.whole = [0, 1];
    /** @type {[number, number] | null} what is shown; the whole when null */
    this.zoom = null;
    /** @type {Spot | null} */
    this.spot = null;
    /** @type {[number, number] | null} pixels */
    this.drag = null;
    this.across = linear([0, 1], [0, 1]);
    this.canvas = h("canvas", { class: "plot gantt", tabindex: 0, role: "img" });
    this.reading = h("p", { class: "reading muted", "aria-live": "polite" });
    this.fit = h("button", { class: "tiny", type: "button", hidden: true }, "whole");
    this.element = h("div", { class: "ganttbox" }, this.canvas, h("div", { class: "readings" }, this.reading, this.fit));
    this.surface = new Surface(this.canvas, (context, area) => this.paint(context, area));
    this.fit.addEventListener("click", () => this.show(null));
    this.listen();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") this.drag = [event.offsetX, event.offsetX];
    });
    canvas.addEventListener("pointermove", (event) => this.pointed(event));
    canvas.addEventListener("pointerup", (event) => this.released(event));
    canvas.addEventListener("pointerleave", () => {
      this.drag = null;
      this.choose(null);
    });
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("dblclick", () => this.show(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /**
   * @param {Row[]} rows
   * @param {[number, number] | null} whole what an unzoomed view spans
   */
  set(rows, whole) {
    this.rows = rows;
    this.whole = whole ?? [0, 1];
    this.canvas.style.setProperty("height", `${rows.length * ROW_PIXELS + AROUND_PIXELS}px`);
    const count = rows.reduce((sum, row) => sum + row.lanes.flat().length, 0);
    setAttribute(this.canvas, "aria-label", `${this.name}: ${rows.length} rows, ${count} cells; arrow keys go from one to the next`);
    setAttribute(this.canvas, "data-rows", rows.length);
    setAttribute(this.canvas, "data-cells", count);
    this.spot = null;
    this.show(null);
    this.choose(null);
  }

  /** @param {[number, number] | null} view */
  show(view) {
    this.zoom = view;
    this.fit.hidden = view === null;
    setAttribute(this.canvas, "data-zoomed", view !== null);
    this.surface.changed();
  }

  get view() {
    return this.zoom ?? this.whole;
  }

  /** @param {Spot | null} spot */
  cell(spot) {
    return spot ? this.rows[spot.row]?.lanes[spot.lane]?.[spot.index] ?? null : null;
  }

  /** @param {Spot | null} spot */
  choose(spot) {
    this.spot = spot;
    setText(this.reading, this.cell(spot)?.words ?? "Point at a cell to read it; drag to zoom.");
    this.surface.changed();
  }

  /** @param {PointerEvent} event */
  pointed(event) {
    if (this.drag) {
      this.drag = [this.drag[0], event.offsetX];
      this.surface.changed();
    } else {
      this.choose(this.find(event.offsetX, event.offsetY));
    }
  }

  /** @param {PointerEvent} event */
  released(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag) return;
    const [from, to] = [drag[0], event.offsetX].sort((a, b) => a - b);
    if (from === undefined || to === undefined || to - from < DRAG_PIXELS) return;
    const [low, high] = this.view;
    this.show([Math.max(this.across.invert(from), low), Math.min(this.across.invert(to), high)]);
  }

  /** @param {number} x @param {number} y @returns {Spot | null} */
  find(x, y) {
    const row = Math.floor((y - GAP_PIXELS - 3) / ROW_PIXELS);
    const lanes = this.rows[row]?.lanes;
    if (!lanes) return null;
    const inside = (y - GAP_PIXELS - 3 - row * ROW_PIXELS) / ROW_PIXELS;
    const lane = lanes.length > 1 && inside > UPPER_SHARE ? 1 : 0;
    const slack = Math.abs(this.across.invert(SLACK_PIXELS) - this.across.invert(0));
    const index = cellAt(lanes[lane] ?? [], this.across.invert(x), slack);
    return index < 0 ? null : { row, lane, index };
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const factor = { "+": 0.5, "-": 2 }[event.key];
    if (move) this.step(move[0] ?? 0, move[1] ?? 0);
    else if (factor) this.zoomBy(factor);
    else if (event.key === "Escape") this.show(null);
    else return;
    event.preventDefault();
  }

  /** @param {number} steps @param {number} down */
  step(steps, down) {
    this.choose(neighbour(this.rows, this.spot, steps, down));
    const cell = this.cell(this.spot);
    const [low, high] = this.view;
    if (!cell || !this.zoom || (cell.start < high && cell.end > low)) return;
    const shift = (cell.start + cell.end - low - high) / 2;
    this.show([low + shift, high + shift]);
  }

  /** @param {number} factor */
  zoomBy(factor) {
    const cell = this.cell(this.spot);
    const [low, high] = this.view;
    const at = cell ? (cell.start + cell.end) / 2 : (low + high) / 2;
    const view = zoomed([low, high], reach(this.rows) ?? this.whole, at, factor);
    this.show(view[0] <= this.whole[0] && view[1] >= this.whole[1] ? null : view);
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area */
  paint(context, area) {
    if (this.rows.length === 0) return;
    this.across = linear(this.view, [area.left, area.right]);
    const up = linear([-0.5, this.rows.length - 0.5], [GAP_PIXELS + 3, GAP_PIXELS + 3 + this.rows.length * ROW_PIXELS]);
    const ticks = this.ticks(this.view[0], this.view[1], Math.max(Math.floor((area.right - area.left) / 96), 2));
    frame(context, area, { scale: this.across, ticks, label: this.label },
      { scale: up, ticks: this.rows.map((_, index) => index), label: (index) => this.rows[index]?.label ?? "" });
    const style = getComputedStyle(this.canvas);
    context.save();
    context.beginPath();
    context.rect(area.left, 0, area.right - area.left, area.height);
    context.clip();
    context.font = `10px ${style.fontFamily}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.rows.forEach((row, index) => this.paintRow(context, area, style, row, up.at(index - 0.5)));
    if (this.drag) this.paintDrag(context, area, style);
    context.restore();
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {CSSStyleDeclaration} style @param {Row} row @param {number} top */
  paintRow(context, area, style, row, top) {
    const room = ROW_PIXELS - GAP_PIXELS;
    const upper = Math.round(room * UPPER_SHARE);
    row.lanes.forEach((cells, lane) => {
      const y = top + GAP_PIXELS / 2 + (lane ? upper + 1 : 0);
      const high = row.lanes.length === 1 ? room : lane ? room - upper - 1 : upper;
      for (const one of drawn(cells, this.view[0], this.view[1], area.right - area.left)) this.paintCell(context, style, one, y, high);
    });
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {CSSStyleDeclaration} style
   * @param {{cell: Cell, start: number, end: number}} one @param {number} y @param {number} high
   */
  paintCell(context, style, { cell, start, end }, y, high) {
    const [low, last] = this.view;
    const left = this.across.at(Math.max(start, low));
    const right = this.across.at(Math.min(end, last));
    const chosen = this.cell(this.spot);
    const aside = chosen !== null && chosen.group !== null && cell.group !== chosen.group;
    const width = Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75);
    context.fillStyle = style.getPropertyValue(`--work-${cell.tone.replaceAll("_", "-")}`).trim() || style.getPropertyValue("--idle");
    context.globalAlpha = (cell.soft ? 0.5 : 1) * (aside ? 0.3 : 1);
    context.fillRect(left, y, width, high);
    context.globalAlpha = 1;
    if (cell === chosen) {
      context.strokeStyle = style.getPropertyValue("--text");
      context.lineWidth = 1.5;
      context.strokeRect(left, y, width, high);
    }
    if (high < TEXT_PIXELS || aside || width < 12 || context.measureText(cell.text).width > width - 3) return;
    context.fillStyle = style.getPropertyValue(cell.soft ? "--text" : "--on-work");
    context.fillText(cell.text, left + width / 2, y + high / 2 + 0.5);
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {CSSStyleDeclaration} style */
  paintDrag(context, area, style) {
    const [from, to] = this.drag ?? [0, 0];
    context.fillStyle = style.getPropertyValue("--accent");
    context.globalAlpha = 0.18;
    context.fillRect(Math.min(from, to), 0, Math.abs(to - from), area.bottom);
    context.globalAlpha = 1;
  }
}

/**
 * What the colours mean.
 * @param {readonly string[]} tones
 */
export const key = (tones) =>
  h("div", { class: "legend" }, ...tones.map((tone) =>
    h("span", { class: "entry" }, styled(h("span", { class: "swatch block" }), "background", `var(--work-${tone.replaceAll("_", "-")}, var(--idle))`), tone.replaceAll("_", " "))));
