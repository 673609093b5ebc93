/** A live line chart: several series, linear or logarithmic, with a crosshair that reads the values; dragging zooms. */

import { decimate, lowerBound, nearest } from "../lib/decimate.js";
import { number, percent } from "../lib/format.js";
import { extent, footed, linear, linearTicks, logarithmic, logTicks, padded, percentLabel, tickLabel } from "../lib/scales.js";
import { PERCENT } from "../lib/series.js";
import { Surface, colour, crisp, follow, frame, line } from "./canvas.js";
import { h, setAttribute, setText, styled } from "./dom.js";

/** @typedef {import("./canvas.js").Box} Box */
/** @typedef {import("../lib/scales.js").Scale} Scale */
/**
 * @typedef {object} Curve
 * @property {string} name
 * @property {readonly number[]} x
 * @property {readonly number[]} y
 * @property {boolean} [marked] whether each of its points is drawn
 * @property {number | null} [best] the index of its best value
 * @property {readonly number[]} [low] the least of what the curve is the mean of, and
 * @property {readonly number[]} [high] the greatest
 * @property {readonly string[]} [jobs] whose curve it is
 */
/** @typedef {{at: number, x: number, text: string, width: number, middle: number}} Reading the crosshair and its words */

const COLOURS = 6;
/** A drag over fewer pixels is a click. */
const DRAGGED = 5;
/** Points of a curve that can be marked one by one. */
const MARKED = 400;
/** How lines of one colour differ. */
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];
/** Curves that can be told apart; more of them are drawn without a legend. */
export const TOLD_APART = COLOURS * DASHES.length;

export class Chart {
  /**
   * @param {{title: string, unit: string, log: boolean}} panel
   * @param {import("./canvas.js").Crosshair} crosshair
   * @param {{label: (x: number, step?: number) => string, word: string}} axis how the horizontal axis speaks
   */
  constructor(panel, crosshair, axis) {
    this.panel = panel;
    const shares = panel.unit === PERCENT;
    this.value = shares ? (/** @type {number | undefined} */ value) => percent(value, 1) : (/** @type {number | undefined} */ value) => number(value);
    this.tick = shares ? percentLabel : tickLabel;
    this.log = panel.log;
    this.crosshair = crosshair;
    this.axis = axis;
    /** @type {Curve[]} */
    this.curves = [];
    /** @type {Set<string>} */
    this.hidden = new Set();
    /** The curve that stands out, by its name. @type {string | null} */
    this.raised = null;
    /** The colours of curves in the theme of the last painting. @type {string[]} */
    this.palette = [];
    /** @type {Scale} */
    this.across = linear([0, 1], [0, 1]);
    /** @type {[number, number] | null} */
    this.reach = null;
    this.canvas = h("canvas", { class: "plot", tabindex: 0, role: "img" });
    this.legend = h("div", { class: "legend" });
    this.toggle = h("button", { class: "tiny", type: "button", "aria-pressed": String(this.log), title: "Logarithmic axis" },
      "log");
    this.whole = h("button", { class: "tiny", type: "button", hidden: true, title: "Show all steps" }, "whole");
    /** @type {[number, number] | null} pixels */
    this.drag = null;
    this.element = h("figure", { class: "chart", "data-chart": panel.title },
      h("figcaption", {}, h("span", { class: "title" }, panel.title), h("span", { class: "unit" }, shares ? "" : panel.unit), this.whole, this.toggle),
      this.legend, this.canvas);
    this.surface = new Surface(this.canvas, (context, area) => this.paint(context, area));
    this.toggle.addEventListener("click", () => this.setLog(!this.log));
    crosshair.addEventListener("move", () => this.pointed());
    follow(this.canvas, crosshair, (pixel) => this.across.invert(pixel), (from, steps) => this.neighbour(from, steps));
    this.zoomable();
  }

  /** Dragging shows a part of the horizontal axis in all charts of the crosshair; so do + and -. */
  zoomable() {
    const { canvas, crosshair } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") this.drag = [event.offsetX, event.offsetX];
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) this.drag = [this.drag[0], event.offsetX];
    });
    canvas.addEventListener("pointerup", (event) => this.released(event.offsetX));
    canvas.addEventListener("pointerleave", () => (this.drag = null));
    canvas.addEventListener("dblclick", () => crosshair.show(null));
    this.whole.addEventListener("click", () => crosshair.show(null));
    canvas.addEventListener("keydown", (event) => this.magnify({ "+": 0.5, "-": 2 }[event.key]));
    crosshair.addEventListener("view", () => {
      this.whole.hidden = crosshair.view === null;
      this.surface.changed();
    });
  }

  /** @param {number} to */
  released(to) {
    const from = this.drag?.[0] ?? to;
    this.drag = null;
    if (Math.abs(to - from) >= DRAGGED) this.look(this.across.invert(Math.min(from, to)), this.across.invert(Math.max(from, to)));
  }

  /** @param {number | undefined} factor of what is shown, around the crosshair */
  magnify(factor) {
    const [low, high] = this.crosshair.view ?? this.reach ?? [0, 0];
    const middle = Math.min(Math.max(this.crosshair.at ?? (low + high) / 2, low), high);
    if (factor) this.look(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }

  /** Shows a part of what there is; all of it as the whole. @param {number} low @param {number} high */
  look(low, high) {
    const [first, last] = this.reach ?? [0, 0];
    const view = /** @type {[number, number]} */ ([Math.max(low, first), Math.min(high, last)]);
    if (view[0] < view[1]) this.crosshair.show(view[0] === first && view[1] === last ? null : view);
  }

  /**
   * @param {Curve[]} curves
   * @param {[number, number] | null} reach what the horizontal axis spans, in common with other charts
   */
  set(curves, reach) {
    this.reach = reach;
    if (curves.map((curve) => curve.name).join() !== this.curves.map((curve) => curve.name).join()) this.relist(curves);
    this.curves = curves;
    const last = curves.slice(0, TOLD_APART).map((curve) => `${curve.name} ${this.value(curve.y.at(-1))}`).join(", ");
    const points = Math.max(0, ...curves.map((curve) => curve.x.length));
    setAttribute(this.canvas, "aria-label", `${this.panel.title}: ${points} points, last ${last}`);
    setAttribute(this.canvas, "data-points", points);
    this.pointed();
  }

  /** Lets one curve stand out, or none. @param {string | null} name */
  raise(name) {
    if (this.raised === name) return;
    this.raised = name;
    this.surface.changed();
  }

  /** @param {boolean} log */
  setLog(log) {
    this.log = log;
    setAttribute(this.toggle, "aria-pressed", String(log));
    this.surface.changed();
  }

  /** @param {Curve[]} curves */
  relist(curves) {
    const listed = curves.length > TOLD_APART ? [] : curves;
    this.legend.replaceChildren(...listed.map((curve, index) => this.legendEntry(curve, index, curves.length > 1)));
  }

  /** @param {Curve} curve @param {number} index @param {boolean} several */
  legendEntry(curve, index, several) {
    const value = h("span", { class: "value" });
    const top = h("span", { class: "best muted" });
    const swatch = swatchOf(index);
    if (!several) return h("span", { class: "entry", "data-name": curve.name }, swatch, value, top);
    const entry = h("button", { class: "entry", type: "button", "aria-pressed": "true", "data-name": curve.name,
      title: "Show or hide" }, swatch, h("span", {}, curve.name), value, top);
    entry.addEventListener("click", () => {
      if (!this.hidden.delete(curve.name)) this.hidden.add(curve.name);
      setAttribute(entry, "aria-pressed", String(!this.hidden.has(curve.name)));
      this.surface.changed();
    });
    return entry;
  }

  /** The crosshair or the data moved: the numbers in the legend and the picture follow. */
  pointed() {
    this.curves.forEach((curve, index) => {
      const at = this.crosshair.at === null ? curve.x.length - 1 : nearest(curve.x, this.crosshair.at);
      const value = this.legend.children[index]?.querySelector(".value");
      if (value) setText(value, this.value(curve.y[at]));
      const top = this.legend.children[index]?.querySelector(".best");
      if (top) setText(top, this.bestOf(curve));
    });
    this.surface.changed();
  }

  /** The best value and where it was, in a few words; none where that is the last. @param {Curve} curve */
  bestOf({ x, y, best }) {
    const at = best === null || best === undefined ? undefined : x[best];
    return at === undefined || best === y.length - 1 ? "" : `best ${this.value(y[/** @type {number} */ (best)])} at ${this.axis.label(at)}`;
  }

  /** @param {number | null} from @param {number} steps */
  neighbour(from, steps) {
    const x = this.curves[0]?.x ?? [];
    const start = from === null ? x.length - 1 : nearest(x, from);
    return x[Math.min(Math.max(start + steps, 0), x.length - 1)] ?? null;
  }

  shown() {
    return this.curves.map((curve, index) => ({ ...curve, index })).filter((curve) => !this.hidden.has(curve.name));
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area */
  paint(context, area) {
    const style = getComputedStyle(this.canvas);
    this.palette = Array.from({ length: COLOURS }, (_, index) => style.getPropertyValue(`--series-${index}`).trim());
    const curves = this.shown();
    const wide = this.crosshair.view ?? this.reach;
    const high = extent(curves.flatMap((curve) => within(curve, this.crosshair.view)), this.log);
    if (!wide || !high) return void this.paintNothing(context, area);
    setAttribute(this.canvas, "data-view", wide.map(this.axis.label).join(" to "));
    this.across = linear(wide[0] === wide[1] ? [wide[0] - 1, wide[1] + 1] : wide, [area.left, area.right]);
    const zero = this.log && curves.some((curve) => curve.y.includes(0));
    const span = padded(high, this.log);
    const up = (this.log ? logarithmic : linear)(zero ? footed(span) : span, [area.bottom, area.top]);
    const reading = this.reading(context, area, curves);
    this.paintFrame(context, area, up, zero, reading);
    const raised = curves.filter((curve) => curve.name === this.raised);
    context.save();
    if (this.crosshair.view) clip(context, area);
    for (const curve of [...curves.filter((curve) => curve.name !== this.raised), ...raised]) {
      context.globalAlpha = raised.length && curve.name !== this.raised ? 0.2 : 1;
      this.paintCurve(context, area, up, curve);
    }
    context.restore();
    if (reading) this.paintCrosshair(context, area, up, curves, reading);
    if (this.drag) this.paintDrag(context, area, this.drag);
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {[number, number]} drag */
  paintDrag(context, area, [from, to]) {
    context.fillStyle = colour(this.canvas, "--accent");
    context.globalAlpha = 0.18;
    context.fillRect(Math.min(from, to), area.top, Math.abs(to - from), area.bottom - area.top);
    context.globalAlpha = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area */
  paintNothing(context, area) {
    context.fillStyle = getComputedStyle(this.canvas).getPropertyValue("--muted");
    context.font = `12px ${getComputedStyle(this.canvas).fontFamily}`;
    context.textAlign = "center";
    const words = this.log ? "nothing positive to show on a logarithmic axis" : "no finite values yet";
    context.fillText(words, area.width / 2, area.height / 2);
  }

  /**
   * Where the crosshair stands, snapped to the nearest point, and what it says below the axis.
   * @param {CanvasRenderingContext2D} context @param {Box} area @param {Curve[]} curves
   * @returns {Reading | null}
   */
  reading(context, area, curves) {
    const at = this.crosshair.at;
    if (at === null) return null;
    const anchor = curves[0]?.x[nearest(curves[0].x, at)] ?? at;
    const x = this.across.at(anchor);
    if (x < area.left - 1 || x > area.right + 1) return null;
    const text = `${this.axis.word} ${this.axis.label(anchor)}`;
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    const width = context.measureText(text).width + 12;
    return { at, x, text, width, middle: Math.min(Math.max(x, area.left - 8 + width / 2), area.width - width / 2) };
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {Scale} up @param {boolean} zero at the foot @param {Reading | null} reading */
  paintFrame(context, area, up, zero, reading) {
    const rows = Math.max(Math.floor((area.bottom - area.top) / 42), 2);
    const columns = Math.max(Math.floor((area.right - area.left) / 96), 2);
    const vertical = [...(zero ? [0] : []), ...(up.log ? logTicks : linearTicks)(up.domain[0], up.domain[1], rows)];
    const horizontal = linearTicks(this.across.domain[0], this.across.domain[1], columns);
    frame(context, area, { scale: this.across, ticks: horizontal, label: this.axis.label }, { scale: up, ticks: vertical, label: this.tick },
      reading);
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {Scale} up @param {Curve & {index: number}} curve */
  paintCurve(context, area, up, curve) {
    this.paintSpread(context, up, curve);
    const [low, high] = this.across.domain;
    const kept = decimate(curve.x, curve.y, low, high, Math.max(Math.floor(area.right - area.left), 1));
    context.strokeStyle = this.seriesColour(curve.index);
    const isOneOfMany = this.curves.length > TOLD_APART;
    // Lines of one pixel are drawn in a fraction of the time of wider ones.
    context.lineWidth = curve.name === this.raised ? 2.4 : isOneOfMany ? 1 : kept.x.length > 600 ? 1.1 : 1.6;
    context.lineJoin = isOneOfMany ? "bevel" : "round";
    context.setLineDash(isOneOfMany ? [] : dashOf(curve.index));
    context.beginPath();
    let pen = false;
    const height = (/** @type {number} */ index) => up.at(kept.y[index] ?? Number.NaN);
    kept.x.forEach((x, index) => {
      const y = height(index);
      if (!Number.isFinite(y)) {
        pen = false;
        return;
      }
      if (pen) context.lineTo(this.across.at(x), y);
      else context.moveTo(this.across.at(x), y);
      const isAlone = !pen && !Number.isFinite(height(index + 1));
      if (isAlone) context.arc(this.across.at(x), y, 2, 0, 7);
      pen = true;
    });
    context.stroke();
    context.setLineDash([]);
    this.paintMarks(context, up, curve);
  }

  /** The band between the least and the greatest of what a curve is the mean of. @param {CanvasRenderingContext2D} context @param {Scale} up @param {Curve & {index: number}} curve */
  paintSpread(context, up, { x, low = [], high = [], index }) {
    if (low.length === 0) return;
    const before = context.globalAlpha;
    context.globalAlpha = before * 0.18;
    context.fillStyle = this.seriesColour(index);
    context.beginPath();
    for (const at of low.keys()) context.lineTo(this.across.at(x[at] ?? Number.NaN), up.at(low[at] ?? Number.NaN));
    for (const at of [...high.keys()].reverse()) context.lineTo(this.across.at(x[at] ?? Number.NaN), up.at(high[at] ?? Number.NaN));
    context.fill();
    context.globalAlpha = before;
  }

  /** A dot at each point of a curve that is marked, and a ring round its best. @param {CanvasRenderingContext2D} context @param {Scale} up @param {Curve & {index: number}} curve */
  paintMarks(context, up, curve) {
    const { x, y, marked, best } = curve;
    context.fillStyle = this.seriesColour(curve.index);
    for (const index of marked && x.length <= MARKED ? x.keys() : []) {
      dot(context, this.across.at(x[index] ?? Number.NaN), up.at(y[index] ?? Number.NaN), 2.2);
      context.fill();
    }
    if (!marked || best === null || best === undefined) return;
    dot(context, this.across.at(x[best] ?? Number.NaN), up.at(y[best] ?? Number.NaN), 4.5);
    context.lineWidth = 1.5;
    context.stroke();
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Box} area @param {Scale} up
   * @param {(Curve & {index: number})[]} curves @param {Reading} reading
   */
  paintCrosshair(context, area, up, curves, reading) {
    context.strokeStyle = colour(this.canvas, "--muted");
    context.lineWidth = 1;
    line(context, crisp(reading.x), area.top, crisp(reading.x), area.bottom);
    for (const curve of curves) {
      const index = nearest(curve.x, reading.at);
      const y = up.at(curve.y[index] ?? Number.NaN);
      if (!Number.isFinite(y)) continue;
      context.fillStyle = this.seriesColour(curve.index);
      context.beginPath();
      context.arc(this.across.at(curve.x[index] ?? reading.at), y, 3, 0, 7);
      context.fill();
    }
    this.paintReading(context, area, reading);
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {Reading} reading */
  paintReading(context, area, { middle, width, text }) {
    context.fillStyle = colour(this.canvas, "--text");
    context.beginPath();
    context.roundRect(middle - width / 2, area.bottom + 3, width, 18, 4);
    context.fill();
    context.fillStyle = colour(this.canvas, "--surface");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, middle, area.bottom + 12.5);
  }

  /** @param {number} index */
  seriesColour(index) {
    return this.palette[index % COLOURS] ?? "";
  }
}

/** Keeps what is drawn within the frame. @param {CanvasRenderingContext2D} context @param {Box} area */
function clip(context, area) {
  context.beginPath();
  context.rect(area.left, 0, area.right - area.left, area.bottom);
  context.clip();
}

/** The values of a curve in a part of the horizontal axis, with the nearest on both sides. @param {Curve} curve @param {[number, number] | null} view */
function within({ x, y, low = [], high = [] }, view) {
  if (!view) return [y, low, high];
  const [first, last] = [lowerBound(x, view[0]), lowerBound(x, view[1])];
  return [y, low, high].map((values) => values.slice(Math.max(first - 1, 0), last + 1));
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} radius */
function dot(context, x, y, radius) {
  context.beginPath();
  if (Number.isFinite(x) && Number.isFinite(y)) context.arc(x, y, radius, 0, 7);
}

/** @param {number} index of a curve */
const dashOf = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length] ?? [];

/** The mark of a curve beside its name. @param {number} index */
export const swatchOf = (index) =>
  styled(h("span", { class: "swatch", "data-dash": Math.floor(index / COLOURS) % DASHES.length || null }), "background", `var(--series-${index % COLOURS})`);
