/** What all plots share: a canvas that fits its box and the theme, a frame with ticks, and one crosshair for all. */

import { duration } from "../lib/format.js";
import { apart, stepAt, tickLabel } from "../lib/scales.js";
import { h, oncePerFrame, setAttribute } from "./dom.js";

/** @typedef {import("../lib/scales.js").Scale} Scale */
/** @typedef {{width: number, height: number, left: number, right: number, top: number, bottom: number}} Box */

/** Least pixels between labels one above the other. */
const LINE = 13;
const INSET = { left: 52, right: 12, top: 8, bottom: 24 };

/** A canvas that is drawn again when its size, its theme or its data change, and only while it can be seen, or printed. */
export class Surface {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {(context: CanvasRenderingContext2D, box: Box) => void} paint in CSS pixels
   */
  constructor(canvas, paint) {
    this.canvas = canvas;
    this.paint = paint;
    this.visible = false;
    this.stale = true;
    /** How often it was painted; for tests and for the curious. */
    this.painted = 0;
    this.draw = oncePerFrame(() => this.now());
    new ResizeObserver(() => this.changed()).observe(canvas);
    // Of several changes at once the last one holds.
    new IntersectionObserver((changes) => this.seen(changes.at(-1)?.isIntersecting ?? false), { rootMargin: "120px" }).observe(canvas);
    document.addEventListener("themechange", () => this.changed());
    window.addEventListener("beforeprint", () => {
      if (this.stale) this.now();
    });
  }

  changed() {
    this.stale = true;
    if (this.visible) this.draw();
  }

  /** @param {boolean} visible */
  seen(visible) {
    this.visible = visible;
    if (visible && this.stale) this.draw();
  }

  now() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    const context = this.canvas.getContext("2d");
    if (!context || width === 0 || height === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(width * ratio);
    const high = Math.round(height * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.stale = false;
    this.painted += 1;
    this.paint(context, box(width, height));
  }
}

/** @param {number} width @param {number} height @returns {Box} */
export const box = (width, height) => ({
  width,
  height,
  left: INSET.left,
  right: width - INSET.right,
  top: INSET.top,
  bottom: height - INSET.bottom,
});

/**
 * A colour of the theme by the name of its custom property.
 * @param {Element} element
 * @param {string} name
 */
export const colour = (element, name) => getComputedStyle(element).getPropertyValue(name).trim();

/**
 * Grid lines with their labels.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} area
 * @param {{scale: Scale, ticks: number[], label?: (value: number, step?: number) => string}} across
 * @param {{scale: Scale, ticks: number[], label?: (value: number, step?: number) => string}} up
 * @param {{middle: number, width: number} | null} [taken] where something else stands below the horizontal axis
 */
export function frame(context, area, across, up, taken = null) {
  const style = getComputedStyle(context.canvas);
  context.font = `11px ${style.fontFamily}`;
  context.lineWidth = 1;
  context.strokeStyle = style.getPropertyValue("--grid");
  context.fillStyle = style.getPropertyValue("--muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of apart(up.ticks, up.scale, LINE)) {
    const y = crisp(up.scale.at(tick));
    line(context, area.left, y, area.right, y);
    context.fillText((up.label ?? tickLabel)(tick, stepAt(up.ticks, tick)), area.left - 8, y, area.left - 8); // squeezed before it is cut
  }
  context.textBaseline = "top";
  let free = Number.NEGATIVE_INFINITY;
  for (const tick of across.ticks) {
    const text = (across.label ?? tickLabel)(tick, stepAt(across.ticks, tick));
    const half = context.measureText(text).width / 2;
    const x = Math.min(Math.max(across.scale.at(tick), area.left - 4 + half), area.width - half - 2);
    if (taken && Math.abs(x - taken.middle) < half + taken.width / 2 + 4) continue;
    if (x - half < free) continue;
    free = x + half + 6;
    context.textAlign = "center";
    context.fillText(text, x, area.bottom + 8);
  }
}

/** Half pixels make thin lines sharp. @param {number} value */
export const crisp = (value) => Math.round(value) + 0.5;

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 */
export function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** A position that several charts point at together, and the part of the horizontal axis that they show. */
export class Crosshair extends EventTarget {
  /** @type {number | null} */
  at = null;
  /** The whole when null. @type {[number, number] | null} */
  view = null;

  /** @param {[number, number] | null} view */
  show(view) {
    this.view = view;
    this.dispatchEvent(new Event("view"));
  }

  /** @param {number | null} at in units of the horizontal axis */
  move(at) {
    if (this.at === at) return;
    this.at = at;
    this.dispatchEvent(new Event("move"));
  }
}

/**
 * Pointer and arrow keys move the crosshair; leaving and Escape take it away.
 * @param {HTMLCanvasElement} canvas
 * @param {Crosshair} crosshair
 * @param {(pixel: number) => number} invert
 * @param {(from: number | null, steps: number) => number | null} neighbour the point some places further
 */
export function follow(canvas, crosshair, invert, neighbour) {
  canvas.addEventListener("pointermove", (event) => crosshair.move(invert(event.offsetX)));
  canvas.addEventListener("pointerdown", (event) => crosshair.move(invert(event.offsetX)));
  canvas.addEventListener("pointerleave", () => crosshair.move(null));
  canvas.addEventListener("blur", () => crosshair.move(null));
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") crosshair.move(null);
    if (steps === undefined) return;
    event.preventDefault();
    crosshair.move(neighbour(crosshair.at, steps));
  });
}

/** How the two horizontal axes tell their values. */
export const AXES = {
  step: { label: tickLabel, word: "step" },
  time: { label: duration, word: "after" },
};

/**
 * Buttons that choose the horizontal axis.
 * @param {"step" | "time"} first @param {(by: "step" | "time") => void} choose
 */
export function axisSwitch(first, choose) {
  const buttons = /** @type {const} */ (["step", "time"]).map((by) => {
    const button = h("button", { class: "tiny", type: "button", "aria-pressed": String(by === first) }, by);
    button.addEventListener("click", () => {
      for (const other of buttons) setAttribute(other, "aria-pressed", String(other === button));
      choose(by);
    });
    return button;
  });
  return h("span", { class: "switch", role: "group", "aria-label": "Horizontal axis" }, ...buttons);
}
