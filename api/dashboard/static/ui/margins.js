/** Margins of many instances as stems from zero, coloured by verdict. */

import { drawable, gather } from "../lib/bounds.js";
import { extent, linear, linearTicks, padded } from "../lib/scales.js";
import { Surface, crisp, frame, line } from "./canvas.js";
import { h, setAttribute } from "./dom.js";

/** @typedef {import("../lib/types.js").BoundRow} BoundRow */
/** @typedef {import("./canvas.js").Box} Box */
/** @typedef {import("../lib/scales.js").Scale} Scale */

/** @type {Record<string, string>} */
export const TONES = { verified: "--good", falsified: "--bad", unknown: "--warn", timeout: "--idle" };
const LEAST_PIXELS = 3;

export class Margins {
  /** @param {(row: BoundRow) => void} choose told which instance the user points at */
  constructor(choose) {
    this.choose = choose;
    /** @type {BoundRow[]} */
    this.rows = [];
    /** @type {"instance" | "margin"} */
    this.order = "instance";
    /** @type {number | null} */
    this.chosen = null;
    this.across = linear([0, 1], [0, 1]);
    this.canvas = h("canvas", { class: "plot", tabindex: 0, role: "img" });
    this.surface = new Surface(this.canvas, (context, area) => this.paint(context, area));
    this.canvas.addEventListener("click", (event) => this.pick(Math.round(this.across.invert(event.offsetX))));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {Iterable<BoundRow>} rows */
  set(rows) {
    this.rows = drawable(rows, this.order);
    setAttribute(this.canvas, "aria-label", `Margins of ${this.rows.length} instances; arrow keys go from one to the next`);
    setAttribute(this.canvas, "data-points", this.rows.length);
    this.surface.changed();
  }

  /** @param {number} position */
  pick(position) {
    const row = this.rows[Math.min(Math.max(position, 0), this.rows.length - 1)];
    if (row) this.choose(row);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (steps === undefined) return;
    event.preventDefault();
    this.pick(this.rows.findIndex((row) => row.instance === this.chosen) + steps);
  }

  /** @param {number | null} instance */
  mark(instance) {
    this.chosen = instance;
    this.surface.changed();
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area */
  paint(context, area) {
    const margins = extent([this.rows.map((row) => row.margin ?? Number.NaN), [0]]);
    if (!margins || this.rows.length === 0) return;
    const air = this.rows.length === 1 ? 1 : 0.5;
    this.across = linear([-air, this.rows.length - 1 + air], [area.left, area.right]);
    const up = linear(padded(margins, false), [area.bottom, area.top]);
    const steps = linearTicks(0, this.rows.length - 1, Math.max(Math.floor((area.right - area.left) / 80), 2));
    const label = (/** @type {number} */ at) => String(this.order === "instance" ? (this.rows[at]?.instance ?? at) : at);
    frame(context, area, { scale: this.across, ticks: steps.filter(Number.isInteger), label },
      { scale: up, ticks: linearTicks(up.domain[0], up.domain[1], Math.max(Math.floor((area.bottom - area.top) / 42), 2)) });
    const style = getComputedStyle(this.canvas);
    context.strokeStyle = style.getPropertyValue("--line-strong");
    line(context, area.left, crisp(up.at(0)), area.right, crisp(up.at(0)));
    const columns = gather(this.rows, (area.right - area.left) / LEAST_PIXELS);
    for (const column of columns) this.stem(context, area, up, column, columns.length);
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {Scale} up @param {import("../lib/bounds.js").Column} column @param {number} count */
  stem(context, area, up, column, count) {
    const room = (area.right - area.left) / count;
    const chosen = column.worst.instance === this.chosen;
    const colour = getComputedStyle(this.canvas).getPropertyValue(TONES[column.worst.verdict] ?? "--idle");
    const x = this.across.at(column.at);
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineWidth = chosen ? 3 : Math.min(Math.max(room * 0.25, 1), 2);
    line(context, x, up.at(0), x, up.at(column.low));
    if (column.high !== column.low) line(context, x, up.at(column.low), x, up.at(column.high));
    context.beginPath();
    context.arc(x, up.at(column.low), chosen ? 5 : Math.min(Math.max(room * 0.3, 1.5), 3.5), 0, 7);
    context.fill();
    context.lineWidth = 1;
  }
}
