/** Margins of many instances as stems from zero, coloured by verdict; a cross on zero is a verdict without margin. */

import { gather, ordered } from "../lib/bounds.js";
import { extent, linear, linearTicks, padded } from "../lib/scales.js";
import { Surface, crisp, frame, line } from "./canvas.js";
import { h, setAttribute } from "./dom.js";

/** @typedef {import("../lib/types.js").BoundsRow} BoundsRow */
/** @typedef {import("./canvas.js").Box} Box */
/** @typedef {import("../lib/scales.js").Scale} Scale */

/** @type {Record<string, string>} */
export const TONES = { verified: "--good", falsified: "--bad", unknown: "--warn", timeout: "--idle" };
const LEAST_PIXELS = 3;

export class Margins {
  /** @param {(row: BoundsRow) => void} choose told which instance the user points at */
  constructor(choose) {
    this.choose = choose;
    /** @type {BoundsRow[]} */
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

  /** @param {Iterable<BoundsRow>} rows */
  set(rows) {
    this.rows = ordered(rows, this.order);
    const bare = this.rows.filter((row) => row.margin === null).length;
    setAttribute(this.canvas, "aria-label",
      `Margins of ${this.rows.length} instances${bare ? `, ${bare} without one` : ""}; arrow keys go from one to the next`);
    setAttribute(this.canvas, "data-bare", bare);
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
    frame(context, area, { scale: this.across, ...this.labels(area) },
      { scale: up, ticks: linearTicks(up.domain[0], up.domain[1], Math.max(Math.floor((area.bottom - area.top) / 42), 2)) });
    const style = getComputedStyle(this.canvas);
    context.strokeStyle = style.getPropertyValue("--line-strong");
    line(context, area.left, crisp(up.at(0)), area.right, crisp(up.at(0)));
    const columns = gather(this.rows, (area.right - area.left) / LEAST_PIXELS);
    for (const column of columns) this.stem(context, area, up, column, columns.length);
  }

  /** Instances below the axis; by margin, only which end is which. @param {Box} area */
  labels(area) {
    const last = this.rows.length - 1;
    if (this.order === "margin") {
      return { ticks: last > 0 ? [0, last] : [0], label: (/** @type {number} */ at) => (at === 0 ? "least margin" : "greatest margin") };
    }
    const ticks = linearTicks(0, last, Math.max(Math.floor((area.right - area.left) / 80), 2)).filter(Number.isInteger);
    return { ticks, label: (/** @type {number} */ at) => String(this.rows[at]?.instance ?? at) };
  }

  /** @param {CanvasRenderingContext2D} context @param {Box} area @param {Scale} up @param {import("../lib/bounds.js").Column} column @param {number} count */
  stem(context, area, up, column, count) {
    const room = (area.right - area.left) / count;
    const x = this.across.at(column.at);
    const { least, high, bare } = column;
    if (least) {
      const chosen = least.instance === this.chosen;
      const low = up.at(least.margin ?? Number.NaN);
      this.paintIn(context, least, chosen ? 3 : Math.min(Math.max(room * 0.25, 1), 2));
      line(context, x, up.at(0), x, low);
      if (up.at(high) !== low) line(context, x, low, x, up.at(high));
      context.beginPath();
      context.arc(x, low, chosen ? 5 : Math.min(Math.max(room * 0.3, 1.5), 3.5), 0, 7);
      context.fill();
    }
    if (bare) this.cross(context, x, up.at(0), bare);
    context.lineWidth = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {BoundsRow} row */
  cross(context, x, y, row) {
    const chosen = row.instance === this.chosen;
    const arm = chosen ? 6 : 4;
    this.paintIn(context, row, chosen ? 3 : 2);
    line(context, x - arm, y - arm, x + arm, y + arm);
    line(context, x - arm, y + arm, x + arm, y - arm);
  }

  /** @param {CanvasRenderingContext2D} context @param {BoundsRow} row @param {number} wide */
  paintIn(context, row, wide) {
    const colour = getComputedStyle(this.canvas).getPropertyValue(TONES[row.verdict] ?? "--idle");
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineWidth = wide;
  }
}
